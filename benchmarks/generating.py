"""What an attached encoding costs a decoder: a forward pass, and generating with a dynamic, static or compiled cache.

python -m benchmarks.generating             # a decoder of 16 layers on the GPU, or a small one on a CPU
python -m benchmarks.generating --compiled  # also with the cache that transformers compiles
"""

import argparse
import contextlib
import warnings

import torch
import transformers

from benchmarks.measuring import seconds
from pelocality import AttenuatedEncoding, DistanceTable, RotaryEncoding, attach


def median(function, repeats: int) -> float:
    """Return the median time of a call in milliseconds, after a first one."""
    function()
    return 1e3 * sorted(seconds(function) for _ in range(repeats))[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiled", action="store_true", help="also with a static cache that transformers compiles")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    sizes = {"hidden_size": 1024, "num_hidden_layers": 16} if gpu else {"hidden_size": 256, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(
        vocab_size=1000, num_attention_heads=16, num_key_value_heads=8, intermediate_size=2816, pad_token_id=0, **sizes
    )
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    model = transformers.LlamaForCausalLM(config).eval().to(device, dtype)
    head = config.hidden_size // config.num_attention_heads
    text = torch.randint(3, 1000, (8, 1024 if gpu else 128), device=device)
    prompt = torch.randint(3, 1000, (1, 256 if gpu else 64), device=device)
    encodings = {
        "no encoding": None,
        "rotation": RotaryEncoding(head).scaled(0.5),
        "attenuated, weights": AttenuatedEncoding(16, decay=0.3, causal=True),
        "table": DistanceTable(16, length=64),
    }

    def generate(cache: str, **more) -> None:
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, min_new_tokens=48, do_sample=False,
            cache_implementation=cache, **more,
        )  # fmt: skip

    for name, encoding in encodings.items():
        with torch.no_grad(), attach(model, encoding, prove=False) if encoding else contextlib.nullcontext():
            row = [
                median(lambda: model(text), arguments.repeats),
                median(lambda: generate("dynamic", disable_compile=True), arguments.repeats),
                median(lambda: generate("static", disable_compile=True), arguments.repeats),
            ]
            if arguments.compiled:
                row.append(median(lambda: generate("static"), arguments.repeats))
        print(f"{name:20s}", *(f"{each:9.1f} ms" for each in row))


if __name__ == "__main__":
    main()
