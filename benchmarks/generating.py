"""What an attached encoding costs a decoder: a forward pass, and generating with a dynamic, static or compiled cache.

python -m benchmarks.generating             # a decoder of 16 layers on the GPU, or a small one on a CPU
python -m benchmarks.generating --compiled  # also with the cache that transformers compiles
"""

import argparse
import contextlib
import warnings
from typing import Any

import torch
import transformers

from benchmarks.measuring import seconds
from pelocality import AttenuatedEncoding, DistanceTable, RotaryEncoding, attach


def median(function, repeats: int) -> float:
    """Return the median time of a call in milliseconds, after a first one."""
    function()
    return 1e3 * sorted(seconds(function) for _ in range(repeats))[repeats // 2]


def small_decoder(gpu: bool) -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 16} if gpu else {"hidden_size": 256, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(
        vocab_size=1000, num_attention_heads=16, num_key_value_heads=8, intermediate_size=2816, pad_token_id=0, **sizes
    )
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    return transformers.LlamaForCausalLM(config).eval().to(device, dtype)


def encodings(model: transformers.LlamaForCausalLM) -> dict[str, Any]:
    config = model.config
    return {
        "no encoding": None,
        "rotation": RotaryEncoding(config.hidden_size // config.num_attention_heads).scaled(0.5),
        "attenuated, weights": AttenuatedEncoding(16, decay=0.3, causal=True),
        "table": DistanceTable(16, length=64),
    }


def generate(model: transformers.LlamaForCausalLM, prompt: torch.Tensor, tokens: int, **options: Any) -> None:
    mask = torch.ones_like(prompt)
    model.generate(
        prompt, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiled", action="store_true", help="also with a static cache that transformers compiles")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    model = small_decoder(gpu)
    text = torch.randint(3, 1000, (8, 1024 if gpu else 128), device=model.device)
    prompt = torch.randint(3, 1000, (1, 256 if gpu else 64), device=model.device)

    def generated(cache: str, **more: Any) -> float:
        return median(lambda: generate(model, prompt, 48, cache_implementation=cache, **more), arguments.repeats)

    for name, encoding in encodings(model).items():
        with torch.no_grad(), attach(model, encoding, prove=False) if encoding else contextlib.nullcontext():
            row = [
                median(lambda: model(text), arguments.repeats),
                generated("dynamic", disable_compile=True),
                generated("static", disable_compile=True),
            ]
            if arguments.compiled:
                row.append(generated("static"))
        print(f"{name:20s}", *(f"{each:9.1f} ms" for each in row))


if __name__ == "__main__":
    main()
