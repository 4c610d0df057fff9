"""Pre-train a small BERT by masked language modelling, any positional encoding by flag, and watch its positions.

    python examples/pretrain_mlm.py --output runs/story --steps 200      # the story in examples/data
    python examples/pretrain_mlm.py books.txt.gz --output runs/learned-0 --seed 0
    python examples/pretrain_mlm.py books.txt.gz --output runs/attenuated --encoding attenuated --decay 0.5 --symmetry 1
    torchrun --nproc_per_node 2 examples/pretrain_mlm.py books.txt.gz --output runs/learned-0 --batch 16

The text has one paragraph a line. One run of paragraphs in fifty is held out; a word-piece tokenizer is trained on the
rest once for each text, beside the output folder. Killed at any moment, the same command goes on from the last complete
checkpoint and ends where it would have; with other flags or another text it is refused, and once the run is complete it
only prints the result. In the output folder: run.json (flags and text), checkpoints, trajectory.csv (locality and
symmetry per layer over training), result.json.
"""

import argparse
import gzip
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from runs import claim, fingerprint, last_complete_checkpoint, train, write_whole
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.modeling_outputs import MaskedLMOutput

from pelocality import AttenuatedEncoding, LocalityCallback, NoEncoding, attach
from pelocality.models.callback import encoding_parameters

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class MaskedOnlyBert(BertForMaskedLM):
    """BERT that predicts the words asked for and no others: the same loss for a fraction of the vocabulary's cost."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> MaskedLMOutput:
        """The loss of the words asked for; without labels, the logits of all."""
        if labels is None:
            return super().forward(input_ids, **options)
        asked = labels != -100
        hidden = self.bert(input_ids, **options).last_hidden_state
        return MaskedLMOutput(loss=functional.cross_entropy(self.cls(hidden[asked]), labels[asked]))


class EncodingTrainer(Trainer):
    """A Trainer whose weight decay leaves encodings alone: it would pull them to its own idea of zero."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """The parameters that decay."""
        return [name for name in super().get_decay_parameter_names(model) if name not in encoding_parameters(model)]


def paragraphs(path: Path) -> tuple[list[str], list[str]]:
    """The training part, and every fiftieth run of (where there are enough) 100 paragraphs, held out."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]
    run = min(100, len(lines) // 50)
    if run == 0:
        raise ValueError(f"{path} has {len(lines)} paragraphs; at least 50 are needed to hold some out")
    parts: tuple[list[str], list[str]] = ([], [])
    for number, line in enumerate(lines):
        parts[number // run % 50 == 49].append(line)
    return parts


def train_tokenizer(text: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(text, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def blocks(text: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Dataset:
    """Numbered blocks of `length` tokens, running on over paragraphs, framed by [CLS] and [SEP]."""
    held: list[int] = []
    rows: list[list[int]] = []
    for ids in tokenizer(text, add_special_tokens=False)["input_ids"]:
        held += ids
        while len(held) >= length - 2:
            rows.append([tokenizer.cls_token_id, *held[: length - 2], tokenizer.sep_token_id])
            held = held[length - 2 :]
    if not rows:
        raise ValueError(f"{len(text)} paragraphs do not fill one block of --length {length}; give a longer text")
    return Dataset.from_dict({"input_ids": rows, "number": range(len(rows))})


def prepare(arguments: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, Dataset, Dataset]:
    """Tokenizer, training blocks and held-out blocks; made by the first run on a text, read by those beside it.

    Training the tokenizer twice would give two of them, since equally frequent pieces are drawn.
    """
    name = f"text-{arguments.vocabulary}-{arguments.length}-{fingerprint(arguments.text.read_bytes())}"
    folder = arguments.output.parent / name
    if not folder.exists():
        train_text, held_out_text = paragraphs(arguments.text)
        tokenizer = train_tokenizer(train_text, arguments.vocabulary)
        with TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as unfinished:
            made = Path(unfinished) / name
            tokenizer.save_pretrained(made)
            blocks(train_text, tokenizer, arguments.length).save_to_disk(made / "train")
            blocks(held_out_text, tokenizer, arguments.length).save_to_disk(made / "held-out")
            with suppress(OSError):  # a run beside this one was faster; its tokenizer is the one to use
                made.rename(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    train, held_out = (load_from_disk(folder / part) for part in ("train", "held-out"))
    # the held-out words asked for are the same in every run
    share = arguments.masked
    return tokenizer, masked(train, tokenizer, share, 1 + arguments.seed), masked(held_out, tokenizer, share, seed=0)


def masked(numbered: Dataset, tokenizer: PreTrainedTokenizerFast, share: float, seed: int) -> Dataset:
    """The blocks with a share of their words asked for: 80 % of those masked, 10 % replaced, 10 % left, as in BERT.

    Which words is drawn from the seed and the block's number alone, equally many in every block: so neither a restart
    nor the number of processes changes what is learned.
    """
    first_word = len(SPECIAL)

    def mask(block: list[int], number: int) -> tuple[list[int], list[int]]:
        generator = np.random.default_rng([seed, number])
        ids = np.array(block)
        labels = np.full(len(ids), -100)
        places = 1 + generator.permutation(len(ids) - 2)[: round(share * (len(ids) - 2))]
        labels[places] = ids[places]
        fate = generator.random(len(places))
        ids[places[fate < 0.8]] = tokenizer.mask_token_id
        replaced = places[fate >= 0.9]
        ids[replaced] = generator.integers(first_word, len(tokenizer), len(replaced))
        return ids.tolist(), labels.tolist()

    def mask_batch(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        pairs = [mask(block, number) for block, number in zip(batch["input_ids"], batch["number"], strict=True)]
        ids, labels = zip(*pairs, strict=True)
        return {"input_ids": list(ids), "labels": list(labels)}

    return numbered.with_transform(mask_batch)


def make_model(arguments: argparse.Namespace, vocabulary: int) -> MaskedOnlyBert:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        intermediate_size=4 * arguments.width,
        max_position_embeddings=arguments.length,
        hidden_dropout_prob=arguments.dropout,
        attention_probs_dropout_prob=arguments.dropout,
        initializer_range=arguments.width**-0.5,  # BERT's 0.02 is near this for 768 units, and whispers in fewer
    )
    model = MaskedOnlyBert(config)
    if arguments.encoding == "attenuated":
        encoding = AttenuatedEncoding(
            heads=arguments.heads,
            decay=arguments.decay,
            symmetry=arguments.symmetry,
            form=arguments.form,
            learnable=arguments.learnable,
        )
        attach(model, encoding)
    elif arguments.encoding == "none":
        attach(model, NoEncoding(heads=arguments.heads))
    return model


# the flags of an attenuated encoding, and what they are unless given
ATTENUATED = {"decay": 0.5, "symmetry": 1.0, "form": "logits", "learnable": False}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a command, or of this script's own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ours = Path(__file__).with_name("data") / "text.txt"
    parser.add_argument(
        "text", type=Path, nargs="?", default=ours, help="text file, one paragraph a line; .gz is read as it is"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of this run")
    parser.add_argument("--encoding", choices=("learned", "none", "attenuated"), default="learned")
    parser.add_argument("--decay", type=float, help="the paper's w; 0.5 if not given")
    parser.add_argument("--symmetry", type=float, help="the paper's s; 1 if not given")
    parser.add_argument("--form", choices=("weights", "logits"), help="logits if not given")
    parser.add_argument("--learnable", action="store_true", default=None, help="train decay and symmetry")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--length", type=int, default=32, help="tokens a block; in long ones positions take long to learn"
    )
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--masked", type=float, default=0.3, help="share of the words asked for; BERT's is 0.15")
    parser.add_argument("--batch", type=int, default=32, help="sequences per process and step")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements and checkpoints")
    parser.add_argument("--words", type=int, default=16, help="identical words per measurement")
    parser.add_argument("--dropout", type=float, default=0.0, help="a run this short sees no text twice")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order, masks and dropout")
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="mixed precision; the default on a GPU. A CPU without units for it is three times slower with it",
    )
    arguments = parser.parse_args(words)
    for name, default in ATTENUATED.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.encoding != "attenuated":
            parser.error(f"--{name} needs --encoding attenuated, got {arguments.encoding}")
    return arguments


def ingredients(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run is made of: flags, text and processes; not where files lie."""
    flags = {name: value for name, value in vars(arguments).items() if name not in ("text", "output")}
    return flags | {
        "text": fingerprint(arguments.text.read_bytes()),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def make(arguments: argparse.Namespace, result: Path) -> None:
    """Train and measure, and write the result last."""
    settings = TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=64,
        prediction_loss_only=True,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.steps // 10,
        weight_decay=0.01,
        bf16=arguments.bf16,
        seed=arguments.seed,
        logging_steps=arguments.every,
        save_steps=arguments.every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        # BERT's loss is a mean over its own batch already; averaged "across devices" the Trainer would multiply it
        average_tokens_across_devices=False,
    )
    with settings.main_process_first():
        tokenizer, train_blocks, held_out = prepare(arguments)
    checkpoint = last_complete_checkpoint(arguments.output)
    if checkpoint and PreTrainedTokenizerFast.from_pretrained(checkpoint).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the text of {arguments.output} was prepared anew since it began; choose another --output")

    set_seed(arguments.seed)
    trainer = EncodingTrainer(
        make_model(arguments, len(tokenizer)),
        settings,
        train_dataset=train_blocks,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    callback = LocalityCallback(trainer, every=arguments.every, length=arguments.length, words=arguments.words)
    trainer.add_callback(callback)
    train(trainer, checkpoint)

    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        callback.table.to_csv(arguments.output / "trajectory.csv", index=False)
        tokens = arguments.steps * settings.train_batch_size * settings.world_size * arguments.length
        found = {"held_out_loss": loss, "held_out_perplexity": math.exp(loss), "tokens": tokens}
        write_whole(result, json.dumps(ingredients(arguments) | found, indent=1))


def main() -> None:
    arguments = parse()
    claim(arguments.output, ingredients(arguments))
    result = arguments.output / "result.json"
    if not result.exists():
        make(arguments, result)
    if os.environ.get("RANK", "0") == "0":
        found = json.loads(result.read_text())
        loss, tokens = found["held_out_loss"], found["tokens"]
        print(f"{arguments.encoding}: held-out masked-LM loss {loss:.3f} after {tokens:,} tokens")


if __name__ == "__main__":
    main()
