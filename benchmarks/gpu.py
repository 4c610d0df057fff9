"""What a GPU takes for all that the library computes there, each beside what one would write by hand.

    python -m benchmarks.gpu --output DIR   # all rows, at most eight minutes on one GPU
    python -m benchmarks.gpu --smoke        # tiny sizes, also on a CPU, in seconds

DIR gets gpu.json and gpu.md. A row that fails, or exceeds the seconds of its part, says so. Times are medians of pairs,
the work and then its comparison, by the clock of the GPU; memory is the peak of one call beyond what was there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pelocality
from benchmarks import attention, generating
from benchmarks.measuring import machine
from benchmarks.metrics import COMPLEMENTARY
from benchmarks.rows import Call, Row, head_lines, run_rows
from pelocality import metrics, models

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def bert(tiny: bool, head: bool = False, implementation: str = "sdpa") -> nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 99} if tiny else {}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    config._attn_implementation = implementation
    make = transformers.BertForMaskedLM if head else transformers.BertModel
    with torch.device(DEVICE):
        return make(config).eval()


def llama(layers: int, heads: int, implementation: str = "sdpa") -> nn.Module:
    width = 64 * heads
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=131_072, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = implementation
    with torch.device(DEVICE):
        return transformers.LlamaModel(config).to(HALF).eval()


def random_ids(*shape: int, vocabulary: int = 5000) -> Tensor:
    return torch.randint(5, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@torch.no_grad()
def read(model: nn.Module, batches: list[Tensor]) -> None:
    for ids in batches:
        model(ids)


@torch.no_grad()
def added_up(model: nn.Module, batches: list[Tensor]) -> Tensor:
    """Return the mean of output_attentions (layer, head, n, n), as one would write it by hand."""
    total, texts = torch.zeros((), device=DEVICE), 0
    for ids in batches:
        total = total + torch.stack(
            [each.sum(0, dtype=torch.float32) for each in model(ids, output_attentions=True).attentions]
        )
        texts += len(ids)
    return total / texts


def metric_rows(tiny: bool) -> list[Row]:
    def weights(shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=DEVICE).softmax(-1).to(dtype)

    def values(metric: Callable[[Tensor], Any], shape: list[int], dtype: torch.dtype) -> tuple[Call, Call]:
        a = weights(shape, dtype)
        return lambda: metric(a), a.sum

    def gradients(shape: list[int], dtype: torch.dtype) -> tuple[Call, Call]:
        a = weights(shape, dtype).requires_grad_()

        def gradient() -> Any:
            both = metrics.measure(a)
            return torch.autograd.grad(both.locality.sum() + both.symmetry.sum(), a)

        return gradient, lambda: torch.autograd.grad((a * a).sum(), a)

    shapes = [[12, 12, 128, 128], [12, 12, 512, 512], [8, 16, 2048, 2048], [4, 8, 4096, 4096], [1, 2, 16384, 16384]]
    shapes, rows = [[2, 2, 16, 16]] if tiny else shapes, []
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        name = str(dtype).partition(".")[2]
        rows.append(Row(f"measure, {name}", "a.sum()", values, metrics.measure, shape, dtype, input=shape))
        work = f"measure, {name}, with gradient"
        rows.append(Row(work, "(a * a).sum(), with gradient", gradients, shape, dtype, input=shape))
    shape = shapes[not tiny]
    for name in ("locality", "symmetry", *COMPLEMENTARY, "relative_asymmetry", "toeplitz_share", "diagonality"):
        rows.append(Row(name, "a.sum()", values, getattr(metrics, name), shape, torch.float32, input=shape))
    return rows


def word_rows(tiny: bool) -> list[Row]:
    n, words = (16, 4) if tiny else (512, 64)

    def calls(implementation: str) -> tuple[Call, Call]:
        own, eager = (bert(tiny, implementation=each) for each in (implementation, "eager"))
        batches = torch.arange(5, 5 + words, device=DEVICE)[:, None].expand(-1, n).split(16)
        ours = partial(models.positional_attention, own, length=n, words=words, progress=False)
        return ours, lambda: added_up(eager, batches)

    work, by_hand = "identical words, BERT-base, {}", "mean of output_attentions, batches of 16"
    return [Row(work.format(each), by_hand, calls, each, n=n, words=words) for each in ("eager", "sdpa")]


def text_rows(tiny: bool) -> list[Row]:
    def calls(layers: int, heads: int, n: int, texts: int) -> tuple[Call, Call]:
        own, eager = (llama(layers, heads, each) for each in ("sdpa", "eager"))
        batches = random_ids(texts, n).split(max(4, 2048 // n))
        mappings = [{"input_ids": ids} for ids in batches]
        options = {"length": n, "special_tokens": True, "progress": False}
        return lambda: models.text_average(own, mappings, **options), lambda: added_up(eager, batches)

    def alone(layers: int, heads: int, n: int, texts: int) -> tuple[Call]:
        return (partial(read, llama(layers, heads), random_ids(texts, n).split(max(4, 2048 // n))),)

    rows = []
    for sizes in [(1, 4, 16, 2)] if tiny else [(2, 32, 512, 4), (4, 32, 1024, 8), (12, 12, 32, 256)]:
        size = dict(zip(("layers", "heads", "n", "texts"), sizes, strict=True))
        weights = sizes[0] * 43 * (64 * sizes[1]) ** 2 // 4  # of the linear maps in `llama`
        rows.append(Row("forward of a decoder", "", alone, *sizes, **size, parameters=weights))
        rows.append(Row("text_average", "mean of output_attentions", calls, *sizes, **size))
    return rows


def influence_rows(tiny: bool) -> list[Row]:
    n, texts = (8, 2) if tiny else (128, 8)

    def calls() -> tuple[Call, Call]:
        model, ids = bert(tiny), random_ids(texts, n, vocabulary=99)
        mappings = [{"input_ids": each[None]} for each in ids]
        runs = [each.expand(n, -1) for each in ids for _ in range(2)]  # a text for each position and direction
        options = {"length": n, "directions": 2, "special_tokens": True, "progress": False}
        return lambda: models.influence(model, mappings, **options), lambda: read(model, runs)

    return [Row("influence, BERT-base", "as many forwards", calls, n=n, texts=texts)]


def attention_rows(tiny: bool, flexible: bool = False) -> list[Row]:
    heads, lengths = (2, (32,)) if tiny else (16, (8192,) if flexible else (8192, 2048, 16_384))
    names = ("fixed: ALiBi", "learned: signed distance table")
    more = () if flexible else ("fixed: attenuated, a decay per head", "learned: attenuated, logits form")

    def calls(name: str, timed: Callable[..., Call], n: int) -> tuple[Call, Call]:
        inputs = [torch.randn(1, heads, n, 64, dtype=HALF, device=DEVICE, requires_grad=True) for _ in range(3)]
        if flexible:
            torch.compiler.reset()  # or the rows before count towards the limit of recompilations
            own = attention.flexible(n, heads)[f"flex, {name}"]
        else:
            own = attention.biased(attention.encodings(heads)[name].to(DEVICE))
        plain = timed(attention.BASELINE, inputs)

        def flash() -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if DEVICE == "cuda" else nullcontext():
                plain()

        return timed(own, inputs), flash

    rows = []
    for n, name in [*itertools.product(lengths, names), *((lengths[0], each) for each in more)]:
        for end, timed in {"": attention.forward, ", backward": attention.both}.items():
            work = f"{'FlexAttention' if flexible else 'biased_attention'}, {name}{end}"
            rows.append(Row(work, "flash SDPA without a bias", calls, name, timed, n, heads=heads, n=n))
    return rows


def training_rows(tiny: bool) -> list[Row]:
    texts, n = (2, 16) if tiny else (16, 512)
    encodings = {
        "attenuated": pelocality.AttenuatedEncoding(12, 0.1),
        "ALiBi": pelocality.ALiBi(12),
        "learned": pelocality.AttenuatedEncoding(12, 0.1, form="logits", learnable=True),
        "table": pelocality.DistanceTable(12, 512),
    }

    def step(encoding: Any = None) -> Call:
        model = bert(tiny, head=True).train()
        if encoding is not None:
            pelocality.attach(model, encoding)
        optimizer, ids = torch.optim.AdamW(model.parameters(), 1e-4), random_ids(texts, n, vocabulary=99)
        mask = (torch.arange(n, device=DEVICE) < n - n // 16).long().expand(texts, -1)

        def one() -> None:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(ids, attention_mask=mask, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return one

    def calls(encoding: Any) -> tuple[Call, Call]:
        return step(encoding), step()

    work = "training step, BERT-base, {} attached"
    return [Row(work.format(each), "plain step", calls, encodings[each], texts=texts, n=n) for each in encodings]


def logit_rows(tiny: bool) -> list[Row]:
    layers, heads, n = (1, 4, 64) if tiny else (2, 32, 32_768)

    def calls() -> tuple[Call]:
        model, texts = llama(layers, heads), [{"input_ids": random_ids(4, min(n, 512))}]
        options = {"length": n, "special_tokens": True, "progress": False}
        return (lambda: models.positional_logits(model, texts=texts, **options),)

    return [Row("positional_logits", "", calls, layers=layers, heads=heads, n=n)]


def long_rows(tiny: bool) -> list[Row]:
    def calls(layers: int, heads: int, n: int) -> tuple[Call, Call]:
        model, ids = llama(layers, heads), random_ids(1, n)
        options = {"length": n, "matrices": False, "special_tokens": True, "progress": False}
        return lambda: models.text_average(model, [{"input_ids": ids}], **options), lambda: read(model, [ids])

    work, lengths = "metrics of text without a matrix", (32,) if tiny else (8192, 131_072)
    return [Row(work, "forward", calls, 2, 8, n, layers=2, heads=8, texts=1, n=n) for n in lengths]


def generating_rows(tiny: bool) -> list[Row]:
    tokens, n = (4, 16) if tiny else (48, 256)

    def calls(name: str) -> tuple[Call, ...]:
        plain, own = (generating.small_decoder(not tiny).to(DEVICE) for _ in range(2))
        pelocality.attach(own, generating.encodings(own)[name], prove=False)
        options = {"cache_implementation": "dynamic", "disable_compile": True}
        ids = random_ids(1, n, vocabulary=1000)
        return tuple(partial(generating.generate, each, ids, tokens, **options) for each in (own, plain))

    names = ("rotation", "attenuated, weights", "table")
    return [Row(f"generating, {name}", "plain decoder", calls, name, prompt=n, new_tokens=tokens) for name in names]


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "metrics": metric_rows, "words": word_rows, "texts": text_rows, "influence": influence_rows,
    "attention": attention_rows, "training": training_rows, "logits": logit_rows, "generating": generating_rows,
    "long": long_rows, "flex": partial(attention_rows, flexible=True),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder of gpu.json and gpu.md")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=45, help="of each part; rows behind them are not run")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.smoke:
        parser.error("there is no GPU; --smoke runs tiny sizes on the CPU")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported would be searched for garbage before each row
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    head = {"machine": machine(), "transformers": transformers.__version__}
    head |= {"pelocality": pelocality.__version__, "commit": asked.stdout.strip()}
    about = ", ".join(f"{name} {each}" for name, each in head.items() if each)
    lines = ["# What a GPU takes", "", f"`python -m benchmarks.gpu` on {about}:", "", *head_lines()]
    print(*lines, sep="\n", flush=True)
    entries, start = [], time.perf_counter()
    for part in options.parts:
        rows = PARTS[part](options.smoke) if DEVICE == "cuda" or part != "flex" else []
        run_rows(rows, options.seconds, repeats=2 if options.smoke else 7)
        lines += map(str, rows)
        entries += [{"part": part} | row.entry for row in rows]
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            whole = head | {"seconds": time.perf_counter() - start, "rows": entries}
            (options.output / "gpu.json").write_text(json.dumps(whole, indent=1) + "\n")
            (options.output / "gpu.md").write_text("\n".join(lines) + "\n")
    failed = [each["work"] for each in entries if each["failed"] and "NotImplemented" not in each["failed"]]
    if options.smoke and failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
