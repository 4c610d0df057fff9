"""Measure the time of attention with an encoding relative to SDPA without a bias, and its peak memory.

python -m benchmarks.attention               # a few minutes
python -m benchmarks.attention --bfloat16    # on a GPU
python -m benchmarks.attention --smoke       # a few seconds, to test that it runs

On CUDA also FlexAttention with the encoding as a score modification, up to n = 16,384.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.measuring import arguments, extra_mebibytes, machine, paired
from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    RelativeEncoding,
    T5Buckets,
    biased_attention,
)

HEADS, WIDTH, TOKENS = 8, 64, 2048
# FlexAttention's default blocks need more shared memory than an H100 has
FLEXIBLE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8, "bwd_num_stages": 2, "bwd_num_warps": 4}
FLEXIBLE |= {f"bwd_BLOCK_{each}": 64 for each in ("M1", "N1", "M2", "N2")}
ROW = "| {:>6} | {:<52} | {:>8} | {:>9} | {:>8} | {:>9} | {:>9} |"


@dataclass(frozen=True)
class Contender:
    """An implementation of attention and its parameters other than queries, keys and values."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    learned: tuple[Tensor, ...] = ()


def biased(encoding: RelativeEncoding) -> Contender:
    return Contender(lambda q, k, v: biased_attention(q, k, v, encoding), tuple(encoding.parameters()))


def sdpa(bias: Callable[[int], Tensor], *learned: Tensor) -> Contender:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias(q.shape[-2])[None].to(q.dtype))

    return Contender(attend, learned)


def eager(bias: Callable[[int], Tensor], *learned: Tensor) -> Contender:
    return Contender(
        lambda q, k, v: (q @ k.transpose(-1, -2) / WIDTH**0.5 + bias(q.shape[-2]).to(q.dtype)).softmax(-1) @ v, learned
    )


def encodings(heads: int = HEADS) -> dict[str, RelativeEncoding]:
    decays = torch.logspace(-3, 0, heads)
    return {
        "fixed: attenuated, all heads equal": AttenuatedEncoding(heads),
        "fixed: attenuated, a decay per head": AttenuatedEncoding(heads, decays),
        "fixed: ALiBi": ALiBi(heads),
        "learned: attenuated, logits form": AttenuatedEncoding(heads, decays, form="logits", learnable=True),
        "learned: attenuated, weights form": AttenuatedEncoding(heads, decays, learnable=True),
        "learned: signed distance table": DistanceTable(heads, 512, signed=True),
        "learned: KERPLE (log)": KERPLE(heads),
        "learned: T5 buckets": T5Buckets(heads),
    }


def contenders(n: int, device: str) -> dict[str, Contender]:
    found = {}
    for name, encoding in encodings().items():
        encoding.to(device)
        found[name] = biased(encoding)
    for name in ("fixed: ALiBi", "learned: signed distance table"):
        encoding = encodings()[name].to(device)
        found[f"{name}, as a mask"] = sdpa(once_if_fixed(encoding, n), *encoding.parameters())
        found |= padded(name, encoding, n)
    mask = torch.nn.Parameter(torch.zeros(HEADS, n, n, device=device))
    found["limit for learned: SDPA, learnable (heads, n, n) mask"] = sdpa(lambda n: mask, mask)
    by_distance = torch.nn.Parameter(torch.zeros(HEADS, 2 * n - 1, device=device))
    distance = torch.arange(n, device=device) - torch.arange(n, device=device)[:, None] + n - 1
    found["usual for learned: SDPA, table[:, j - i]"] = sdpa(lambda n: by_distance[:, distance], by_distance)
    config = T5Config(d_model=HEADS * WIDTH, d_kv=WIDTH, num_heads=HEADS)
    t5 = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(device)
    table = torch.nn.init.zeros_(t5.relative_attention_bias.weight)
    found["peer: transformers' T5 bias"] = sdpa(lambda n: t5.compute_bias(n, n)[0], table)
    try:
        from x_transformers.x_transformers import AlibiPositionalBias
    except ImportError:
        print("x-transformers is not installed, skipping its ALiBi")
    else:
        alibi = AlibiPositionalBias(HEADS).to(device)
        found["peer: x-transformers' ALiBi"] = sdpa(lambda n: alibi(n, n))
    found["eager, fixed ALiBi"] = eager(once_if_fixed(ALiBi(HEADS).to(device), n))
    distance_table = DistanceTable(HEADS, 512).to(device)
    found["eager, learned distance table"] = eager(distance_table, *distance_table.parameters())
    return found | flexible(n) if device == "cuda" else found


def once_if_fixed(encoding: RelativeEncoding, n: int) -> Callable[[int], Tensor]:
    """Return the bias as a function of n: a fixed one is built once, as models share it between layers."""
    fixed = encoding(n).detach()
    return encoding if tuple(encoding.parameters()) else lambda n: fixed


def padded(name: str, encoding: RelativeEncoding, n: int) -> dict[str, Contender]:
    """Return attention with padding in the last quarter of every sequence."""
    visible = torch.arange(n, device=encoding.relative(1).device).view(1, 1, 1, n) < n - n // 4
    learned, bias = tuple(encoding.parameters()), once_if_fixed(encoding, n)

    def with_encoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return biased_attention(q, k, v, encoding, mask=visible)

    def mask(n: int) -> Tensor:
        return torch.where(visible[0], bias(n), -torch.inf)

    return {f"{name}, padded": Contender(with_encoding, learned), f"{name}, padded, as a mask": sdpa(mask, *learned)}


def flexible(n: int, heads: int = HEADS) -> dict[str, Contender]:
    """Return FlexAttention, which needs no n x n bias; its backward pass needs CUDA."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def contender(encoding: RelativeEncoding) -> Contender:
        learned = tuple(encoding.to("cuda").parameters())
        fixed = None if learned else encoding.score_modification(n)  # built once, as models share it between layers

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = FLEXIBLE if q.element_size() < 4 else None
            return compiled(q, k, v, score_mod=fixed or encoding.score_modification(n), kernel_options=options)

        return Contender(attend, learned)

    return {f"flex, {name}": contender(encoding) for name, encoding in encodings(heads).items()}


BASELINE = Contender(scaled_dot_product_attention)


def forward(one: Contender, inputs: list[Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return one.attend(*inputs)

    return run


def both(one: Contender, inputs: list[Tensor]) -> Callable[[], object]:
    gradient = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(one.attend(*inputs), (*inputs, *one.learned), gradient)


def report(n: int, name: str, contender: Contender, inputs: list[Tensor], repeats: int) -> None:
    torch.compiler.reset()  # or what others compiled counts towards the limit of recompilations
    took, ratio = paired(forward(contender, inputs), forward(BASELINE, inputs), repeats)
    took_both, ratio_both = paired(both(contender, inputs), both(BASELINE, inputs), repeats)
    figures = (f"{1e3 * took:.1f}", f"{ratio:.2f}", f"{1e3 * took_both:.1f}", f"{ratio_both:.2f}")
    print(ROW.format(n, name, *figures, f"{extra_mebibytes(both(contender, inputs)):.1f}"), flush=True)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], bfloat16="queries, keys and values of half the size")
    dtype = torch.bfloat16 if options.bfloat16 else torch.float32
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # CPUs are slow with denormal numbers, which a steep bias produces
    torch.set_flush_denormal(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{machine()}; {HEADS} heads of {WIDTH}, {TOKENS} tokens a batch, {dtype}; medians of {options.repeats} pairs; "
        "ratio to SDPA without a bias\n"
    )
    print(ROW.format("n", "attention", "fwd ms", "fwd ratio", "+bwd ms", "ratio", "extra MiB"))
    print(ROW.format("---:", "---", "---:", "---:", "---:", "---:", "---:"))
    for n in (32, 64) if options.smoke else (128, 512, 2048):
        shape = (1 if options.smoke else TOKENS // n, HEADS, n, WIDTH)
        inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        for name, contender in {"SDPA without a bias": BASELINE, **contenders(n, device)}.items():
            report(n, name, contender, inputs, options.repeats)
    if device == "cuda" and not options.smoke:
        n = 16_384  # an n x n bias of 8 heads would take 8 GiB
        inputs = [torch.randn(1, HEADS, n, WIDTH, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        for name, contender in flexible(n).items():
            report(n, name, contender, inputs, options.repeats)


if __name__ == "__main__":
    main()
