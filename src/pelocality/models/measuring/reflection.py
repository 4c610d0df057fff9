"""The reflection gap: how far a model is from reversing its output when its input is reversed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pelocality._checks import on_float64_device
from pelocality.models._inference import depend_on_length
from pelocality.models.inputs.tokens import token_batch, tokens_first
from pelocality.models.sequence_model import SequenceModel


def reflection_gap(
    model: nn.Module | SequenceModel,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> Tensor:
    r"""Measure how far a model is from reversing its output when its input is reversed.

    $$\mathrm{gap}(x) = \frac{\lVert F(x) - R F(R x) \rVert}{\lVert F(x) \rVert + \lVert R F(R x) \rVert}$$

    with $F(x)$ the last hidden states of the tokens $x$ and $R$ the reversal of their order. The definition is
    introduced here.

    Attention whose logits are those of content plus a bias that is a function of $\lvert i - j \rvert$ commutes with
    $R$, and so does everything in a transformer that acts on each token alone. So a bidirectional model whose only
    position information is a symmetric encoding (the paper's s = 1) has gap 0, whatever it was trained on: its output
    for "dog bites man" is the reversed output for "man bites dog", and a readout that treats all positions equally
    cannot distinguish them. Any asymmetry breaks this: s other than 1, a causal mask, learned absolute positions.

    Args:
        model: A transformers model, with or without a task head; of an encoder-decoder model the encoder is measured.
        input_ids: (batch, n), or (n,) for one sequence; a batch may be empty. Special tokens are reversed like all
            others.
        attention_mask: As input_ids, 1 for tokens and 0 for padding, on either side; only the tokens are reversed.
            None: no padding, and no id is the model's padding id.
        token_type_ids: Segments, as input_ids, where the model reads them; each is reversed with its token.

    Returns:
        (batch,), float64 (on the CPU where the model's device has none), in [0, 1]: 0 where the model is
        reflection-equivariant, up to the rounding of its precision (about 1e-7 in float32), or where all its hidden
        states are 0; NaN where they hold NaN or infinity. The model is not changed.

    Raises:
        TypeError: Not a transformers model, or ids that are not integers.
        ValueError: Ids or a mask of another shape, a mask with other values or with holes, ids outside the vocabulary,
            more ids than the model has positions for, a padding id without a mask, a sequence of padding only, or
            token types that the model does not have.

    Note:
        Hidden states share a large common part, so a gap well below 1 is large. Compare models, and with
        ``attach(model, encoding)`` symmetries, on the same tokens.

    Examples:
        >>> from pelocality.models import attach
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
        >>> bert = BertModel(config).double()
        >>> ids = torch.tensor([7, 9, 8])
        >>> with attach(bert, AttenuatedEncoding(symmetry=1.0)):
        ...     bool(reflection_gap(bert, ids) < 1e-12)
        True
        >>> with attach(bert, AttenuatedEncoding(symmetry=0.5)):
        ...     bool(reflection_gap(bert, ids) < 1e-12)
        False
    """
    model = SequenceModel.of(model)
    inputs, tokens = token_batch(model, input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
    ids = inputs["input_ids"]
    if not bool(tokens.any(1).all()):
        raise ValueError("attention_mask must be 1 for a token in every sequence, and one is padding only")
    model.check_length(ids.shape[1])
    if not len(ids):  # most models cannot run an empty batch
        return on_float64_device(ids.new_zeros(0)).double()
    first = tokens_first(tokens)
    inputs, tokens = {name: each.gather(1, first) for name, each in inputs.items()}, tokens.gather(1, first)
    lengths = tokens.sum(1).tolist()
    if depend_on_length(model.module) and len(set(lengths)) > 1:  # each as it is alone
        rows = [{name: each[row, :n] for name, each in inputs.items()} for row, n in enumerate(lengths)]
        return torch.cat([reflection_gap(model, **row) for row in rows])
    if bool(tokens.all()):
        inputs.pop("attention_mask", None)
    position = torch.arange(ids.shape[1], device=ids.device)
    order = torch.where(tokens, tokens.sum(1, keepdim=True) - 1 - position, position)
    forward = model.outputs(inputs).last_hidden_state
    backward = model.outputs({name: each.gather(1, order) for name, each in inputs.items()}).last_hidden_state
    backward = backward.gather(1, order[..., None].expand_as(backward))
    difference, one, other = (
        torch.linalg.vector_norm(on_float64_device(torch.where(tokens[..., None], states, 0)).double(), dim=(1, 2))
        for states in (forward - backward, forward, backward)
    )
    total = one + other
    return torch.where(total == 0, 0, difference / total)  # two outputs of zeros are equal
