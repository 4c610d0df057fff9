"""A complete small encoder around PositionalSelfAttention, trained for about a minute to guess masked words.

    python examples/small_encoder.py                                  # the story in examples/data
    python examples/small_encoder.py my_text.txt --encoding none      # your own text, .txt or .gz
    python examples/small_encoder.py --encoding attenuated --mode concat

Prints the loss on held-out text and, where the encoding is learned, what it learned. Compare encodings by running it
once for each.
"""

import argparse
import gzip
import re
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from pelocality import metrics
from pelocality.encodings import KERPLE, ALiBi, AttenuatedEncoding, DistanceTable, NoEncoding
from pelocality.encodings.layers import PositionalSelfAttention
from pelocality.models.callback import encoding_parameters

LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
PAD, MASK, UNKNOWN = 0, 1, 2

ENCODINGS = {
    "attenuated": lambda: AttenuatedEncoding(HEADS, [0.02, 0.1, 0.5, 2.0], form="logits", learnable=True),
    "published": lambda: AttenuatedEncoding(HEADS, decay=0.5),  # delta itself, as in the paper's code: a weak bias
    "table": lambda: DistanceTable(HEADS, LENGTH, signed=True),
    "alibi": lambda: ALiBi(HEADS),
    "kerple": lambda: KERPLE(HEADS),
    "none": lambda: NoEncoding(HEADS),
}


class Block(nn.Module):
    """One layer: attention and a feed-forward network, each added to what came in."""

    def __init__(self, attention: PositionalSelfAttention) -> None:
        super().__init__()
        self.attention = attention
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # noqa: D102
        attended, _ = self.attention(self.before_attention(x), key_padding_mask=padding, need_weights=False)
        x = x + attended
        return x + self.network(self.before_network(x))


class Encoder(nn.Module):
    """Word embeddings, blocks, and a guess for each word. Positions enter through the attention alone."""

    def __init__(self, words: int, encoding: str, mode: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.blocks = nn.ModuleList(
            Block(PositionalSelfAttention(WIDTH, HEADS, ENCODINGS[encoding](), mode=mode)) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(tokens)  # (batch, n, d)
        for block in self.blocks:
            x = block(x, tokens == PAD)
        return self.norm(x) @ self.embedding.weight.T  # (batch, n, words)


def read(path: Path, words: int) -> tuple[Tensor, Tensor]:
    """Paragraphs as rows of word numbers, (paragraphs, LENGTH): nine tenths to train on, and the last to test."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        paragraphs = [found for line in file if len(found := re.findall(r"\w+|[^\w\s]", line.lower())) >= 8]
    if len(paragraphs) < 20:
        raise SystemExit(f"{path} has {len(paragraphs)} lines of at least 8 words; at least 20 are needed")
    known = [word for word, _ in Counter(word for one in paragraphs for word in one).most_common(words - 3)]
    number = {word: i + 3 for i, word in enumerate(known)}
    rows = torch.full((len(paragraphs), LENGTH), PAD)
    for row, paragraph in zip(rows, paragraphs, strict=True):
        ids = torch.tensor([number.get(word, UNKNOWN) for word in paragraph[:LENGTH]])
        row[: len(ids)] = ids
    cut = len(rows) * 9 // 10
    return rows[:cut], rows[cut:]


def loss(model: Encoder, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Cross-entropy at words that were masked, one in seven of those that are known."""
    hidden = (torch.rand(rows.shape, generator=generator) < 1 / 7) & (rows > UNKNOWN)
    guesses = model(rows.masked_fill(hidden, MASK))[hidden]
    return nn.functional.cross_entropy(guesses, rows[hidden])


@torch.no_grad()
def held_out(model: Encoder, rows: Tensor) -> float:
    model.eval()
    generator = torch.Generator().manual_seed(1)  # the same masks for every encoding
    losses = [loss(model, batch, generator) for batch in rows[:1024].split(64)]
    model.train()
    return torch.stack(losses).mean().item()


def describe(model: Encoder) -> None:
    """Print what each layer's encoding has come to."""
    for depth, block in enumerate(model.blocks):
        encoding = block.attention.encoding
        weights = encoding.weights(LENGTH).detach()
        print(
            f"layer {depth}  locality {metrics.locality(weights).numpy().round(2)}  "
            f"direction balance {metrics.direction_balance(weights).numpy().round(2)}"
        )
        if isinstance(encoding, AttenuatedEncoding):
            w, s = encoding.decay.detach(), encoding.symmetry.detach()
            print(f"         decay {w.numpy().round(3)}  symmetry {s.numpy().round(2)}")


def main() -> None:
    ours = Path(__file__).with_name("data") / "text.txt"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "text", type=Path, nargs="?", default=ours, help="a text file, one paragraph a line; may be .gz"
    )
    parser.add_argument("--encoding", choices=ENCODINGS, default="attenuated")
    parser.add_argument("--mode", choices=["add", "concat", "sequence"], default="add")
    parser.add_argument("--steps", type=int, default=250, help="of 64 paragraphs each")
    parser.add_argument("--words", type=int, default=4000, help="size of the vocabulary")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not arguments.text.exists():
        raise SystemExit(f"{arguments.text} is not there; name a text file of your own: small_encoder.py my_text.txt")

    train, test = read(arguments.text, arguments.words)
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    model = Encoder(arguments.words, arguments.encoding, arguments.mode)
    print(f"{arguments.encoding}, {arguments.mode}: {sum(p.numel() for p in model.parameters()):,} parameters")
    describe(model)
    # an encoding's few numbers learn faster than the weights, and weight decay would pull them to its own idea of zero
    own = encoding_parameters(model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if name not in own], "lr": 2e-3},
        {"params": [*own.values()], "lr": 2e-2, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    started = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        batch = train[torch.randint(len(train), (64,), generator=generator)]
        optimizer.zero_grad()
        value = loss(model, batch, generator)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == arguments.steps:
            seconds = time.perf_counter() - started
            print(f"step {step:4}  {seconds:4.0f} s  loss {value.item():.3f}  held out {held_out(model, test):.3f}")
    describe(model)


if __name__ == "__main__":
    main()
