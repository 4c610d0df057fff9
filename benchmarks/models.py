"""Time and peak memory of measuring a model, beyond the model itself.

python -m benchmarks.models --repeats 7
"""

import functools

import torch
import transformers

from benchmarks.measuring import arguments, extra_mebibytes, paired, seconds
from experiments.runs import packaged_model
from pelocality import positional_attention

LIMIT = 180  # MiB, the result included, at n = 512 with 64 words
BATCH = 8  # words that a model alone reads at a time
LONG_LIMIT = 10  # times the attention of one layer, of a long input to twelve layers of which one is returned


@torch.no_grad()
def read(model: torch.nn.Module, length: int, words: int) -> None:
    """Run a model on as many repeated words as `positional_attention` does, and keep nothing."""
    for start in range(0, words, BATCH):
        ids = torch.arange(2000 + start, 2000 + min(start + BATCH, words))[:, None].expand(-1, length)
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def main() -> None:
    options = arguments(__doc__)
    length, words = (32, 4) if options.smoke else (512, 64)
    model = transformers.AutoModel.from_pretrained(packaged_model())
    tokenizer = transformers.AutoTokenizer.from_pretrained(packaged_model())

    def measured() -> object:
        return positional_attention(model, tokenizer, length=length, words=words, progress=False)

    positional_attention(model, tokenizer, length=16, words=2)  # what is loaded once
    extra = extra_mebibytes(measured)
    print(f"positional_attention of all-MiniLM-L6-v2, n = {length}, {words} words, {seconds(measured):.1f} s,")
    print(f"{extra:.0f} MiB beyond the model, at most {LIMIT} wanted")

    short = min(length, 128)
    ours = functools.partial(positional_attention, model, tokenizer, short, words=words, progress=False)
    for implementation in ("eager", "sdpa"):
        alone = transformers.AutoModel.from_pretrained(packaged_model(), attn_implementation=implementation).eval()
        _, ratio = paired(ours, functools.partial(read, alone, short, words), options.repeats)
        print(f"n = {short}, {words} words: {ratio:.2f} times as long as the model alone ({implementation})")

    long = 64 if options.smoke else 2048
    sizes = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 12, "num_attention_heads": 12}
    decoder = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=99, **sizes)).eval()

    def one_layer() -> object:
        return positional_attention(decoder, length=long, words=2, layers=[0], progress=False)

    of_a_layer = 12 * long**2 * 4 / 2**20
    times = extra_mebibytes(one_layer) / of_a_layer
    print(f"one layer of a decoder of 12 layers and 12 heads, n = {long}, 2 words, {seconds(one_layer):.1f} s,")
    print(f"{times:.1f} times its attention of {of_a_layer:.1f} MiB, at most {LONG_LIMIT} wanted")
    if extra > LIMIT or (times > LONG_LIMIT and not options.smoke):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
