"""Time and peak memory of measuring a model, beyond the model itself.

python -m benchmarks.models
"""

import transformers

from benchmarks.measuring import arguments, extra_mebibytes, seconds
from experiments.runs import packaged_model
from pelocality import positional_attention

LIMIT = 300  # MiB, the result included, at n = 512 with 64 words


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
    if extra > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
