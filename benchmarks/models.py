"""Time and peak memory of measuring a model, beyond the model itself.

python -m benchmarks.models
"""

import transformers

from benchmarks.measuring import arguments, extra_mebibytes, seconds
from experiments.runs import packaged_model
from pelocality import positional_attention

LIMIT = 180  # MiB, the result included, at n = 512 with 64 words
LONG_LIMIT = 10  # times the attention of one layer, of a long input to twelve layers of which one is returned


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
