"""Train a small encoder with PositionalSelfAttention to predict masked words, in about a minute.

    python examples/small_encoder.py                                  # the story in examples/data
    python examples/small_encoder.py my_text.txt --encoding ALiBi     # your own text, one paragraph a line

Prints the held-out loss, and the locality and direction of each layer's encoding. Run it once per encoding to compare.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from pelocality import PositionalSelfAttention, direction_balance, encodings, locality
from pelocality.models.training.callback import encoding_parameters

LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
OPTIONS = {"AttenuatedEncoding": {"decay": [0.02, 0.1, 0.5, 2.0], "form": "logits", "learnable": True}}
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("text", type=Path, nargs="?", default=Path(__file__).with_name("data") / "text.txt")
parser.add_argument("--encoding", default="AttenuatedEncoding", help="ALiBi, KERPLE, NoEncoding, T5Buckets, ...")
parser.add_argument("--mode", choices=["add", "concat", "sequence"], default="add")
parser.add_argument("--steps", type=int, default=150, help="of 32 paragraphs each")
arguments = parser.parse_args()
torch.manual_seed(0)

text = [line.lower().split()[:LENGTH] for line in arguments.text.read_text(encoding="utf-8").splitlines()]
ids = {word: i for i, word in enumerate(["[PAD]", "[MASK]", *sorted({word for line in text for word in line})])}
rows = [torch.tensor([ids[word] for word in line]) for line in text if len(line) >= 8]
rows = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (paragraphs, n)
train, held_out = rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :]

embedding = nn.Embedding.from_pretrained(torch.randn(len(ids), WIDTH) / WIDTH**0.5, freeze=False)
encoding = getattr(encodings, arguments.encoding)(HEADS, **OPTIONS.get(arguments.encoding, {}))
layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True)
layer.self_attn = PositionalSelfAttention(WIDTH, HEADS, encoding, mode=arguments.mode)
encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)  # each layer has its own copy
positional = encoding_parameters(encoder)  # an encoding's few numbers need a higher learning rate
rest = [parameter for name, parameter in encoder.named_parameters() if name not in positional]
groups = [{"params": [embedding.weight, *rest]}, {"params": [*positional.values()], "lr": 2e-2}]
optimizer = torch.optim.Adam(groups, lr=1e-3)


def masked_word_loss(rows: torch.Tensor) -> torch.Tensor:
    masked = (torch.rand(rows.shape) < 1 / 7) & (rows > 0)
    x = embedding(rows.masked_fill(masked, ids["[MASK]"]))  # (batch, n, d)
    x = encoder(x, src_key_padding_mask=rows == 0)
    return nn.functional.cross_entropy(x[masked] @ embedding.weight.T, rows[masked])


for _ in range(arguments.steps):
    optimizer.zero_grad()
    masked_word_loss(train[torch.randint(len(train), (32,))]).backward()
    optimizer.step()
with torch.no_grad():
    print(f"held-out loss after {arguments.steps} steps: {masked_word_loss(held_out):.3f}")
for layer in encoder.layers:
    A = layer.self_attn.encoding.weights(LENGTH).detach()
    print(f"locality {locality(A).numpy().round(2)}, direction {direction_balance(A).numpy().round(2)}")
