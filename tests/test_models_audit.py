"""Audits find what is wrong in models that run without an error, and nothing in models that are right."""

import sys
from fnmatch import fnmatchcase
from functools import cache, partial

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.bloom import modeling_bloom
from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLTextConfig
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLTextModel
from transformers.models.llama import modeling_llama

from pelocality import AttenuatedEncoding, NoEncoding, attach, audit
from pelocality.models import AttentionFunction, positional_attention
from pelocality.models.families import family_named
from tests.families import FAMILIES, VARIANTS, quantised, same, state, tiny, tiny_any, tokens

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": YARN,
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
BART = {
    "vocab_size": 97, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 1,
}  # fmt: skip
THREE = {"num_hidden_layers": 3}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def build(config, head=False, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (hf.AutoModelForCausalLM if head else hf.AutoModel).from_config(config, dtype=dtype).eval()


def small(name, **more):
    return build(getattr(hf, f"{name}Config")(**SMALL | more))


llama, mistral = partial(small, "Llama"), partial(small, "Mistral")
smollm3 = partial(small, "SmolLM3", no_rope_layers=[1, 0, 1], **THREE)
cohere2 = partial(small, "Cohere2", sliding_window=6, layer_types=KINDS, **THREE)
llama4 = partial(
    small, "Llama4Text", no_rope_layers=[1, 0, 1], attention_chunk_size=6, intermediate_size_mlp=16,
    num_local_experts=2, head_dim=8, **THREE,
)  # fmt: skip
opt = partial(small, "OPT", ffn_dim=32, word_embed_proj_dim=32)


def gpt2(positions=64, head=False):
    config = hf.GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=positions)
    return build(config, head)


def bloom(heads=6, dtype=torch.float32):
    return build(hf.BloomConfig(vocab_size=97, hidden_size=6 * heads, n_layer=2, n_head=heads), dtype=dtype)


def falcon(heads=6, dtype=torch.float32):
    sizes = {"vocab_size": 97, "hidden_size": 6 * heads, "num_hidden_layers": 2, "num_attention_heads": heads}
    return build(hf.FalconConfig(**sizes, alibi=True), dtype=dtype)


def mpt():
    return build(hf.MptConfig(vocab_size=97, d_model=36, n_layers=2, n_heads=6, max_seq_len=256))


def phi(share):
    return small("Phi", num_key_value_heads=4, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": share})


def attentions(model):
    """Return the attention module of each layer."""
    names = ("self_attn", "attn", "self_attention")
    layers = model.layers if hasattr(model, "layers") else model.h
    return [next(getattr(layer, name) for name in names if hasattr(layer, name)) for layer in layers]


def marian():
    return build(hf.MarianConfig(**BART, max_position_embeddings=64, scale_embedding=True)).get_encoder()


def mobilebert():
    sizes = {"hidden_size": 32, "embedding_size": 8, "intra_bottleneck_size": 16, "max_position_embeddings": 64}
    return small("MobileBert", **sizes)


def multimodal(name, sections, **more):
    """Return the language model of a model whose positions have three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    options = SMALL | {"hidden_size": 64, "head_dim": 16, "rope_parameters": rope} | more
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**options)).eval()


xglm = partial(small, "XGLM", d_model=32, ffn_dim=32, num_layers=2, attention_heads=4, max_position_embeddings=64)
windowed, WITHOUT_ROPE = partial(mistral, sliding_window=6), (smollm3, cohere2, llama4)


# ---- what goes wrong in practice: each function takes a model, and pytest's monkeypatch, and breaks the model


def rotated_as(make):
    """Exchange the rotary module of a model."""
    return lambda model, patch: setattr(model, "rotary_emb", make().rotary_emb)


def called_with(change, layers=slice(None)):
    """Change the arguments of attention modules by name: ``change`` returns new ones."""

    def broken(model, patch):
        for module in attentions(model)[layers]:
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs | change(args, kwargs)), with_kwargs=True
            )

    return broken


def masked(visible):
    """Give attention modules another mask than the model builds, of the keys at these distances."""

    def mask(args, kwargs):
        position = torch.arange((args[0] if args else kwargs["hidden_states"]).shape[1])
        seen = visible(position[:, None], position)
        return {"attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9)[None, None]}

    return mask


def causal_within(size):
    return masked(lambda i, j: (j <= i) & (i - j < size))


def with_float_mask(args, kwargs):
    n, mask = (args[0] if args else kwargs["hidden_states"]).shape[1], kwargs.get("attention_mask")
    return {"attention_mask": torch.zeros(1, 1, n, n) if mask is None else mask + torch.zeros(1, 1, n, n)}


def runs_with_a_mask(model, padded=False):
    """Return a list that grows by whether each run has a mask, with padding if wanted."""
    given = []

    def note(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        given.append(mask is not None and not (padded and bool(mask.all())))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return given


def only_with_a_mask(change, padded=False):
    def broken(model, patch):
        given = runs_with_a_mask(model, padded)
        called_with(lambda args, kwargs: change(args, kwargs) if given[-1] else {})(model, patch)

    return broken


def first_row_moved(model, patch):
    given = runs_with_a_mask(model)
    model.wpe.register_forward_pre_hook(lambda module, args: (args[0] + given[-1] * (args[0].amax() < 63),))


def rotation_function(change):
    """Exchange the function that rotates queries and keys: ``change`` makes it of the right one."""

    def broken(model, patch):
        module = sys.modules[type(model).__module__]
        patch.setattr(module, "apply_rotary_pos_emb", change(module.apply_rotary_pos_emb))

    return broken


def as_in_llama(model, patch):
    for function in ("apply_rotary_pos_emb", "rotate_half"):
        patch.setattr(sys.modules[type(model).__module__], function, getattr(modeling_llama, function))


def neighbours_rotated(q, k, cos, sin, *args, **kwargs):
    """Rotate neighbouring dimensions, as GPT-J does, by Llama's angles."""
    cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for each in (cos, sin))
    return tuple(x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))


def with_slopes(change):
    """Change the slopes of a BLOOM."""
    right = modeling_bloom._get_alibi_slopes
    return lambda model, patch: patch.setattr(modeling_bloom, "_get_alibi_slopes", lambda *args: change(right(*args)))


def rope_in(layer, used):
    def broken(model, patch):
        attention = attentions(model)[layer]
        attention.use_rope = used
        if model.config.model_type == "cohere2":
            attention.sliding_window = 6 if used else None

    return broken


def angles_of_another_base(args, kwargs):
    rotary = llama(rope_parameters={"rope_theta": 25_000.0}).rotary_emb
    return {"position_embeddings": rotary(kwargs["hidden_states"], kwargs["position_ids"])}


def all_dimensions_rotated(model, patch):
    rotated_as(partial(phi, 1.0))(model, patch)
    for attention in attentions(model):
        attention.rotary_ndims = 8


def far_positions_stop(model, patch):
    def stop(module, args, kwargs):
        return args, kwargs | {"position_ids": kwargs["position_ids"].clamp(max=1000)}

    model.rotary_emb.register_forward_pre_hook(stop, with_kwargs=True)


def positions_stop_at_200(model, patch):
    model.wpe.register_forward_pre_hook(lambda module, args: (args[0].clamp(max=200),))


def assigned(path, value):
    """Set an attribute of a part of a model; a function takes the value that was there."""

    def broken(model, patch):
        *parts, name = path.split(".")
        for part in parts:
            model = model[int(part)] if part.isdigit() else getattr(model, part)
        with torch.no_grad():
            setattr(model, name, value(getattr(model, name)) if callable(value) else value)

    return broken


def looked_up_as(change, path):
    """Change what a module of positions returns."""
    return lambda model, patch: model.get_submodule(path).register_forward_hook(lambda *call: change(call[-1]))


def with_weights(change, path):
    """Change the rows of a table in place."""
    return assigned(path, lambda table: table.copy_(change(table.clone())))


def from_position(first):
    def moved(module, args, kwargs):
        return args, kwargs | {"position_ids": kwargs["position_ids"] + first}

    return lambda model, patch: model.rotary_emb.register_forward_pre_hook(moved, with_kwargs=True)


def keys_one_further(right):
    """Rotate each key by the angles of the next position."""
    return lambda q, k, cos, sin, *a: (right(q, k, cos, sin)[0], right(q, k, cos.roll(-1, -2), sin.roll(-1, -2))[1])


def without_mask(layers):
    """Let attention modules see every key that the mask hides."""

    def broken(model, patch):
        for module in list(family_named(model.config.model_type).attention_modules(model))[layers]:
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (
                    tuple(None if isinstance(each, torch.Tensor) and each.ndim == 4 else each for each in args),
                    {name: None if "mask" in name else each for name, each in kwargs.items()},
                ),
                with_kwargs=True,
            )

    return broken


def in_blocks(angles):
    """Let pairs read time, height and width one section after the other, as Qwen2-VL does."""
    return torch.cat([part[axis] for axis, part in enumerate(angles.split([4, 2, 2], -1))], -1).repeat(1, 1, 2)


def counting_padding_from(first):
    """Let a RoBERTa count its positions from a row on, padding too."""
    return assigned(
        "embeddings.create_position_ids_from_input_ids",
        lambda own: lambda ids, *_: torch.arange(first, first + ids.shape[1]).expand(ids.shape),
    )


ROTARY, ALIBI, LEARNED = "declared rotary, base 10000", "declared ALiBi, slopes", "declared learned, measured learned"
LINEAR = partial(llama, rope_parameters=SCALINGS["linear"])
LONG = partial(llama, max_position_embeddings=4096)
COMBINED = "recomposition_frequencies"  # from angles of time, height and width to those of pairs
BERT, ROBERTA = partial(tiny, "bert"), partial(tiny, "roberta")

# a model, what is broken in it, the layers in which this must be found, and how the sentence of it begins
MISTAKES = [
    # rotations
    *(
        (partial(llama, rope_parameters=options), rotated_as(llama), "s 0-1",
         f"{ROTARY}, {name} (factor {options['factor']:.0f})*, measured rotary, base 10000: angles differ")
        for name, options in SCALINGS.items()
    ),
    (LINEAR, rotated_as(lambda: llama(rope_parameters=SCALINGS["linear"] | {"factor": 2.0})), "s 0-1",
     f"{ROTARY}, linear (factor 4), measured rotary, base 10000, linear (factor 2): angles differ"),
    (LINEAR, rotated_as(lambda: llama(rope_parameters=SCALINGS["longrope"] | {"attention_factor": 1.0})), "s 0-1",
     f"{ROTARY}, linear (factor 4), measured rotary: angles differ from position 1 on"),
    (partial(llama, rope_parameters={"rope_theta": 1e6}), rotated_as(llama), "s 0-1",
     "declared rotary, base 1000000, measured rotary, base 10000: angles differ"),
    (llama, called_with(angles_of_another_base, slice(1, 2)), " 1",
     f"{ROTARY}, measured rotary, base 25000: angles differ"),
    (partial(llama, rope_parameters=YARN), assigned("rotary_emb.attention_scaling", 1.0), "s 0-1",
     "declared *attention factor 1.139, measured rotary*: attention factor 1, not 1.139"),
    (llama, lambda model, patch: model.rotary_emb.register_forward_hook(lambda m, a, pair: tuple(2 * x for x in pair)),
     "s 0-1", f"{ROTARY}, measured rotary, base 10000, attention factor 2: attention factor 2, not 1"),
    (partial(phi, 0.5), all_dimensions_rotated, "s 0-1", f"{ROTARY}, 4 of 8 dimensions, measured rotary, base 10000"),
    (LONG, assigned("rotary_emb.inv_freq", lambda f: f * torch.tensor([1, 1, 1, 1.05])), "s 0-1",
     f"{ROTARY}, measured rotary*: angles differ from position"),
    (LONG, far_positions_stop, "s 0-1", f"{ROTARY}, measured rotary, base 10000: angles differ from position 1[0-3]??"),
    # casts the frequencies, which from_pretrained keeps in float32
    (partial(llama, rope_parameters={"rope_theta": 5e5}, head_dim=32), lambda model, patch: model.bfloat16(), "*",
     "declared rotary, base 500000, measured rotary*: angles differ from position"),
    *(
        (llama, rotation_function(change), "s 0-1", f"{ROTARY}, measured {measured}")
        for measured, change in {
            "rotary, base 10000: keys are rotated *": keys_one_further,
            "rotary, base 10000: keys are rotated otherwise": lambda right: lambda q, k, *a: (right(q, k, *a)[0], k),
            "no rotation: keys are rotated": lambda right: lambda q, k, *a: (q, right(q, k, *a)[1]),
            "rotary*: keys": lambda right: lambda q, k, c, s, *a: (right(q, k, c, s)[0], right(q, k, c, -s)[1]),
            "rotary*: angles have the other sign": lambda right: lambda q, k, c, s, *a: right(q, k, c, -s),
            "rotary*: pairs are neighbouring dimensions": lambda right: neighbours_rotated,
        }.items()
    ),
    *(
        (llama, from_position(first), "s 0-1",
         f"{ROTARY}, measured rotary: angles differ from position 0 on, by up to {first} rad")
        for first in (1, 2)
    ),
    *(
        (partial(multimodal, name, [4, 2, 2]), assigned(f"rotary_emb.{attribute}", value), "s 0-1",
         f"{ROTARY}, sections [[]4, 2, 2], measured rotary, base 10000{measured}")
        for name, attribute, value, measured in (
            ("Qwen2_5_VLText", "mrope_section", [2, 3, 3], ", sections [[]2, 3, 3]: angles differ from position 1 on"),
            ("Qwen3VLText", "mrope_section", [2, 3, 3], ", sections [[]3, 3, 2]: angles differ from position 4 on"),
            ("Qwen3VLText", COMBINED, lambda own: in_blocks, ", sections [[]4, 2, 2] laid out as blocks: angles"),
            ("Qwen2VLText", COMBINED, lambda own: lambda x: own(x[[1, 0, 2]]), ", sections [[]2, 4, 2] laid out as no"),
            ("Glm4vText", COMBINED, lambda own: lambda x: own(x.mean(0).expand_as(x)), "; at positions far apart, 16 "),
        )
    ),
    (partial(small, "Ernie4_5"), as_in_llama, "s 0-1", "declared rotary*: pairs are dimensions of both halves"),
    (partial(small, "NanoChat"), as_in_llama, "s 0-1", "declared rotary*: angles have the other sign"),
    *((make, rope_in(1, True), " 1", "declared no rotation, measured rotary, base") for make in WITHOUT_ROPE),
    *((make, rope_in(2, False), " 2", "declared rotary, base *, measured no rotation") for make in WITHOUT_ROPE),
    # visible keys
    (partial(mistral, sliding_window=4, attn_implementation="eager"), called_with(causal_within(999)), "s 0-1",
     "declared window 4, measured none"),
    (partial(mistral, sliding_window=100), called_with(causal_within(999)), "s 0-1",
     "declared window 100, measured none"),
    *((windowed, called_with(causal_within(n)), "s 0-1", f"declared window 6, measured {n}") for n in (5, 7)),
    (partial(tiny, "modernbert"), called_with(masked(lambda i, j: (i - j).abs() <= 4), slice(1, 2)), " 1",
     "declared window 3 to either side, measured 4 to either side"),
    (llama4, called_with(masked(lambda i, j: (j <= i) & (i // 7 == j // 7)), slice(1)), " 0",
     "declared window chunks of 6, measured chunks of 7"),
    (llama, called_with(with_float_mask), "s 0-1", "declared causal, measured attention to later keys"),
    (gpt2, called_with(with_float_mask), "s 0-1", "declared causal, measured attention to later keys"),
    # biases
    (bloom, with_slopes(torch.zeros_like), "s 0-1", f"{ALIBI} *, measured no bias: off by up to"),
    *(
        (partial(bloom, heads), with_slopes(change), "s 0-1", f"{ALIBI} *, measured ALiBi, slopes {slopes}: off by")
        for heads, slopes, change in (
            (6, "0.5 to 0.01562", lambda slopes: 2.0 ** -torch.arange(1.0, 7)),  # of eight heads
            (4, "0.25 to 0.003906", lambda slopes: slopes.roll(-1)),
            (4, "0.25 to 0.003906", lambda slopes: torch.where(slopes == 0.0625, 0.04, slopes)),
        )
    ),
    (partial(bloom, 16), lambda model, patch: model.config.update({"n_head": 32}), "s 0-1",
     f"{ALIBI} 0.8409 to 0.003906, measured ALiBi, slopes 0.70"),
    (bloom, called_with(lambda args, kwargs: {"alibi": kwargs["alibi"].clamp(max=2)}), "s 0-1",
     f"{ALIBI} *, measured relative terms: off by up to"),
    (partial(tiny, "t5"), assigned("encoder.block.0.layer.0.SelfAttention.relative_attention_max_distance", 20),
     "s 0-2", "declared 32 buckets, measured 32 buckets: other buckets from distance"),
    *(
        (make, looked_up_as(change, path), "s 0-2", "declared 32 buckets, measured relative terms")
        for make, path in (
            (partial(tiny, "t5"), "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
            (partial(tiny, "mpnet"), "encoder.relative_attention_bias"),
        )
        for change in (torch.neg, lambda bias: bias.transpose(0, 1), lambda bias: 0.01 * bias)
    ),
    # tables at the input
    (gpt2, with_weights(lambda table: table * (torch.arange(16) < 8), "wpe.weight"), "s 0-1",
     f"{LEARNED}: 8 of 16 dimensions are zero at all positions"),
    (gpt2, lambda model, patch: setattr(model.wpe, "forward", lambda ids: ids[..., None] * torch.ones(16)), "s 0-1",
     "declared learned, measured computed at the input"),
    (llama, looked_up_as(lambda words: words + torch.arange(words.shape[1])[:, None].sin(), "embed_tokens"), "s 0-1",
     "declared no table, measured computed at the input"),
    *(
        (xglm, with_weights(change, "embed_positions.weights"), "s 0-1",
         f"declared sinusoidal from row 2, measured learned from row 2: {difference}")
        for difference, change in (
            ("other sines and cosines at position 1", lambda table: table.roll(1, 0)),
            ("other sines and cosines at position 1", lambda table: table.roll(16, 1)),
            ("other sines and cosines at position 1", lambda table: 2 * table),
            ("other sines and cosines at position 1", torch.neg),
            ("equal vectors at positions 27 and 28", lambda table: table.index_copy(0, torch.tensor(30), table[29:30])),
        )
    ),
    (xglm, assigned("embed_positions.offset", 3), "s 0-1",
     "declared sinusoidal from row 2, measured sinusoidal from row 3: position 0 reads row 3, not row 2"),
    (gpt2, assigned("wpe.weight", nn.init.zeros_), "s 0-1", "declared learned, measured no table: equal vectors"),
    (BERT, assigned("embeddings.position_ids", lambda ids: ids * 0), "s 0-2",
     "declared learned, measured no table"),
    *(
        (BERT, assigned("embeddings.position_ids", partial(torch.clamp, max=last)), "s 0-2",
         f"{LEARNED}: position {last + 1} reads row {last}, not row {last + 1}")
        for last in (20, 37)
    ),
    (partial(gpt2, 300), positions_stop_at_200, "s 0-1", f"{LEARNED}: position 201 reads row 200, not row 201"),
    (partial(gpt2, 300), lambda model, patch: model.wpe.weight.data[250].copy_(model.wpe.weight[7]), "s 0-1",
     f"{LEARNED}: equal vectors at positions 7 and 250"),
    (opt, assigned("decoder.embed_positions.weight", lambda weight: nn.Parameter(weight[:100])), "s 0-1",
     "at 256 positions: a table of 100 rows has no row 100"),
    (ROBERTA, counting_padding_from(0), "s 0-2",
     "declared learned from row 2, measured learned: position 0 reads row 0, not row 2"),
    (opt, assigned("decoder.embed_positions.offset", 0), "s 0-1",
     "declared learned from row 2, measured learned: position 0 reads row 0, not row 2"),
    (ROBERTA, counting_padding_from(2), "s 0-2",
     "behind padding on the left: the first token reads row 7, not row 2"),
    (gpt2, first_row_moved, "s 0-1", "with an attention mask: the first token reads row 1, not row 0"),
    # with a mask alone
    *(
        (partial(tiny, name), without_mask(slice(first, None)), " 2" if first else "s 0-2",
         f"{padded}behind padding on the left: tokens attend to padding")
        for name, padded in (
            *(("llama", ""), ("gpt2", ""), ("t5 decoder", "")),
            *((name, "before padding on the right, ") for name in ("bert", "t5", "albert", "mpnet")),
        )
        for first in (0, -1)
    ),
    (bloom, only_with_a_mask(lambda args, kwargs: {"alibi": kwargs["alibi"] * 0}), "s 0-1",
     "with an attention mask, before padding on the right, behind padding on the left: other attention * distance 1"),
    (bloom, only_with_a_mask(lambda args, kwargs: {"alibi": kwargs["alibi"] * 0}, padded=True), "s 0-1",
     "before padding on the right, behind padding on the left: other attention than without a mask from distance 1 on"),
    *(
        (windowed, only_with_a_mask(causal_within(size)), "s 0-1",
         f"with an attention mask, *: other attention than without a mask from distance {min(size, 6)} on")
        for size in (999, 4)
    ),
]  # fmt: skip


@cache
def unbroken(make):
    return audit(make()).mismatches


@pytest.mark.parametrize(("make", "broken", "layers", "sentence"), MISTAKES, ids=[each[-1] for each in MISTAKES])
def test_a_mistake_is_found_in_its_layers_alone(make, broken, layers, sentence, monkeypatch):
    assert unbroken(make) == ()
    model = make()
    broken(model, monkeypatch)
    found = audit(model).mismatches
    assert all(fnmatchcase(line, f"layer{layers}: *") for line in found)
    assert any(fnmatchcase(line, f"layer{layers}: {sentence}*") for line in found), found


# ---- what reaches the first layer

# What a module of positions returns in place of their vectors (n, d).
NOT_ARRIVING = {
    "zeros": torch.zeros_like,
    "a hundredth": lambda rows: 0.01 * rows,
    "twice": lambda rows: 2 * rows,
    "negative": torch.neg,
    "the first row": lambda rows: rows[..., :1, :].expand_as(rows),
    "the next row": lambda rows: rows.roll(-1, -2),
    "rows in reversed order": lambda rows: rows.flip(-2),
    "one other row": lambda rows: rows.index_copy(-2, torch.tensor(5), rows[..., 4:5, :]),
    "half of the dimensions": lambda rows: rows * (torch.arange(rows.shape[-1]) < rows.shape[-1] // 2),
}
# Words of other widths than positions are mapped before the sum, and words may be multiplied with a factor.
WITH_A_TABLE = {
    "bert": (BERT, "embeddings.position_embeddings"),
    "gpt2": (gpt2, "wpe"),
    "electra": (partial(tiny, "electra"), "embeddings.position_embeddings"),
    "opt": (partial(opt, word_embed_proj_dim=16), "decoder.embed_positions"),
    "mobilebert": (mobilebert, "embeddings.position_embeddings"),
    "squeezebert": (partial(tiny_any, "squeezebert"), "embeddings.position_embeddings"),
    "marian": (marian, "embed_positions"),
    "xglm": (xglm, "embed_positions"),
}


@pytest.mark.parametrize("name", WITH_A_TABLE)
@pytest.mark.parametrize("fault", NOT_ARRIVING)
def test_vectors_of_positions_that_do_not_reach_the_first_layer_are_found(name, fault):
    make, path = WITH_A_TABLE[name]
    model = make()
    looked_up_as(NOT_ARRIVING[fault], path)(model, None)
    position = 5 if fault == "one other row" else "*"
    sentence = f"*: the vector of position {position} does not reach the first layer as a word does"
    assert any(fnmatchcase(line, sentence) for line in audit(model).mismatches)


def test_vectors_that_are_added_in_a_later_layer_do_not_reach_the_first():
    model, vectors = gpt2(), []
    model.wpe.register_forward_hook(lambda module, args, rows: vectors.append(rows) or torch.zeros_like(rows))
    model.h[1].register_forward_pre_hook(lambda block, args: (args[0] + vectors[-1], *args[1:]))
    assert "does not reach the first layer" in audit(model).mismatches[0]


# ---- what is right


def adapted():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["position_embeddings"], init_lora_weights=False)
    return peft.get_peft_model(BERT().float(), settings)


RIGHT = {
    **{name: partial(tiny, name) for name in [*FAMILIES, *VARIANTS]},
    **{
        f"{make.__name__} of {heads} heads in {dtype}": partial(make, heads, dtype)
        for make, heads, dtype in ((bloom, 4, torch.bfloat16), (bloom, 16, torch.float16), (falcon, 16, torch.bfloat16),
                                   (falcon, 4, torch.float32))
    },
    **{
        f"{name} in {dtype}": lambda name=name, dtype=dtype: build(
            getattr(hf, f"{name}Config")(**SMALL | {"hidden_size": 256}), dtype=dtype
        )
        for name, dtype in (("Glm", torch.bfloat16), ("Cohere", torch.float16))
    },
    "MPT": mpt,
    **{
        f"{name} in {dtype}": lambda name=name, dtype=dtype: WITH_A_TABLE[name][0]().to(dtype)
        for name in ("bert", "gpt2", "electra", "opt", "mobilebert", "marian", "xglm")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    **{f"{name} quantised": lambda name=name: quantised(tiny(name)) for name in ("bert", "electra", "llama", "t5")},
    **{f"{name} with sections": partial(multimodal, name, [4, 2, 2])
       for name in ("Qwen2VLText", "Qwen2_5_VLText", "Qwen3VLText", "Glm4vText")},
    "an adapter of positions": adapted,
    "quantised embeddings": lambda: torch.ao.quantization.quantize_dynamic(
        gpt2(), {nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig}
    ),
    "Ernie with sections": partial(multimodal, "Ernie4_5_VLMoeText", [3, 3, 2]),
    "seven positions": partial(gpt2, 7),
    **{name: partial(small, name, head_dim=8) for name in ("Ernie4_5", "Helium", "NanoChat")},
    "GPTJ": partial(small, "GPTJ", rotary_dim=4),
    "700,000 positions": partial(llama, max_position_embeddings=700_000),  # the second one of the far run is then 4
    "1,048,576 positions": partial(llama, max_position_embeddings=1_048_576),
    "a window that is not reached": partial(mistral, sliding_window=20_000),
    "BART that generates": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)).eval(),
    "Marian that generates": lambda: hf.MarianMTModel(hf.MarianConfig(**BART, decoder_start_token_id=1)).eval(),
    "a padding id outside the vocabulary": lambda: build(hf.GPT2Config(**SMALL | {"pad_token_id": 1000}), head=True),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_is_right_has_no_mismatch(name):
    result = audit(RIGHT[name]())
    assert result.mismatches == ()
    assert all(row.positions[0] != "undeclared" for row in result.layers)


def test_sections_that_a_layout_cannot_run_are_named():
    (line,) = audit(multimodal("Qwen3VLText", [2, 3, 3])).mismatches
    assert line.endswith("sections [2, 3, 3], measured rotary, base 10000, sections [3, 3, 2]")


def test_two_angles_in_a_pair_are_named_and_not_judged():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}
    config = HunYuanVLTextConfig(**SMALL | {"head_dim": 16, "rope_parameters": rope})
    result = audit(HunYuanVLTextModel(config).eval())
    assert result.mismatches == ()
    assert "at positions far apart, 16 of 16 dimensions turn with no other one" in result.layers[0].positions[1]


def test_families_that_newer_transformers_have_are_known():
    class LikeHunyuan(hf.LlamaConfig):
        model_type = "hy_v4_vl_text"  # since transformers 5.24

    class LikeLara(hf.Exaone4Config):
        model_type = "lara_mini"  # since transformers 5.24

    (line,) = audit(hf.LlamaModel(LikeHunyuan(**SMALL)).eval()).mismatches
    assert "pairs are dimensions of both halves" in line
    result = audit(hf.Exaone4Model(LikeLara(**SMALL | THREE, layer_types=KINDS, sliding_window=6)).eval())
    assert result.mismatches == ()
    assert [row.positions[0] for row in result.layers] == ["rotary, base 10000", "none", "rotary, base 10000"]
    assert all(family_named(f"inkling{name}_text").relative_terms for name in ("", "2", "2_loop"))


def test_pairs_and_direction_of_a_model_type_unknown_to_transformers_are_not_judged(monkeypatch):
    class OwnConfig(hf.LlamaConfig):
        model_type = "own-llama"

    model = hf.LlamaModel(OwnConfig(**SMALL)).eval()
    rotation_function(lambda right: neighbours_rotated)(model, monkeypatch)
    assert audit(model).mismatches == ()


def test_keys_that_are_zero_are_not_said_to_lack_a_rotation():
    model = llama()
    for attention in attentions(model):
        attention.k_proj.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    assert audit(model).mismatches == ()


@pytest.mark.parametrize("most", [7, 61])
def test_dynamic_scaling_of_few_positions_is_as_declared_also_after_a_long_text(most):
    model = llama(max_position_embeddings=most, rope_parameters=SCALINGS["dynamic"])
    model(tokens(1, 200))
    ids = tokens(1, 90)
    before = model(ids).last_hidden_state
    assert audit(model).mismatches == ()
    torch.testing.assert_close(model(ids).last_hidden_state, before, rtol=0, atol=0)


# ---- with padding on the left


def test_positions_counted_through_left_padding_are_found_in_generation():
    class Forgetful(hf.GPT2LMHeadModel):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            inputs.pop("position_ids")
            return inputs

    model = gpt2(head=True)
    model.generation_config = config = hf.GenerationConfig(num_beams=3, num_return_sequences=3, pad_token_id=0)
    assert audit(model).mismatches == ()
    assert model.generation_config is config
    (line,) = audit(Forgetful(model.config)).mismatches
    assert line == "layers 0-1: behind padding on the left, in generation: the first token reads row 5, not row 0"


def test_a_base_model_that_counts_through_padding_is_cautioned_about():
    result = audit(gpt2())
    assert result.mismatches == ()
    assert "position_ids" in result.cautions[0]
    assert result.notes == (*result.mismatches, *result.cautions)


def test_an_error_that_is_not_of_positions_is_a_caution():
    result = audit(hf.BartForCausalLM(hf.BartConfig(**BART | {"decoder_layers": 3})).eval())
    assert result.mismatches == ()
    (caution,) = result.cautions
    assert caution.startswith("behind padding on the left")
    assert "IndexError" in caution


# ---- what an audit shows


def test_learned_sinks_are_measured():
    model = small("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6)
    with torch.no_grad():
        model.layers[1].self_attn.sinks.fill_(50.0)
    result = audit(model)
    assert result.mismatches == ()
    assert result.layers[1].sinks == pytest.approx(1, abs=1e-3)
    assert 0 < result.layers[0].sinks < 0.5
    assert "sinks" in result._table().columns


def test_layers_of_a_hybrid_have_the_models_numbers():
    result = audit(tiny_any("jamba"))
    assert [row.layer for row in result.layers] == [0, 1, 2, 3]
    assert [row.positions[1] for row in result.layers] == ["linear_attention", "none"] * 2
    assert result.mismatches == ()


def test_a_block_that_runs_several_times_is_held_to_its_own_declaration():
    model = small("Gemma2", head_dim=8, sliding_window=5, num_hidden_layers=4)  # sliding, full, sliding, full
    looped = model.layers[0]  # runs again after block 2, so that the full attention of block 3 is the fifth
    model.layers[2].register_forward_hook(
        lambda block, args, kwargs, states: looped(states, **kwargs), with_kwargs=True
    )
    result = audit(model)
    assert [row.window for row in result.layers] == [(size, size) for size in ("5", "none", "5", "5", "none")]
    assert result.mismatches == ()


def test_each_half_of_an_encoder_decoder_model_is_audited():
    bart, pegasus = (build(config(**BART)) for config in (hf.BartConfig, hf.PegasusXConfig))
    assert [audit(half).layers[0].causal for half in (bart, bart.get_decoder())] == [(False, False), (True, True)]
    assert audit(pegasus.get_decoder()).layers[0].positions == ("sinusoidal", "computed at the input")


def test_an_audit_is_a_text_a_page_and_a_frame(monkeypatch):
    model = mistral(sliding_window=6)
    called_with(causal_within(7))(model, monkeypatch)
    result, sentence = audit(model), "declared window 6, measured 7"
    assert "MistralModel: 2 layers, 2 mismatches" in str(result)  # the mask that is given does not hide padding
    assert f"layers 0-1: {sentence}" in str(result)
    assert f"<p>layers 0-1: {sentence}</p>" in result._repr_html_()
    frame = result.to_frame()
    assert frame[["window_declared", "window_measured"]].to_numpy().tolist() == [["6", "7"]] * 2
    assert frame.mismatches.tolist() == [f"{sentence}; behind padding on the left: tokens attend to padding"] * 2


@pytest.mark.parametrize("name", ["bert", "xlnet", "gpt_oss"])
def test_the_softmax_of_an_attached_encoding_is_not_a_layer(name):
    model = (tiny_any if name == "gpt_oss" else tiny)(name)
    attach(model, AttenuatedEncoding(decay=0.3), position_embeddings="keep")
    result = audit(model)
    assert len(result.layers) == model.config.num_hidden_layers
    assert "nothing was measured" not in str(result)


def test_an_attached_encoding_is_named_and_its_removed_positions_are_found():
    model = llama()
    with attach(model, NoEncoding()):
        result = audit(model)
    assert "with NoEncoding attached" in str(result)
    assert result.mismatches == ("layers 0-1: declared rotary, base 10000, measured no rotation",)
    assert audit(model).mismatches == ()


def test_windows_that_are_longer_than_the_model_are_a_caution():
    result = audit(mistral(sliding_window=20_000))
    assert result.cautions == ("windows of 20000 were not reached with 61 positions",)


# ---- two models


def with_rope_in_layer_1():
    model = smollm3()
    model.layers[1].self_attn.use_rope = True
    return model


def with_another_slow_plane():
    model = llama(max_position_embeddings=4096)
    model.rotary_emb.inv_freq[-1] *= 1.02
    return model


# from which distance on their layers differ, None for not at all, and over how many positions
PAIRS = {
    "equal": (llama, llama, [None] * 2, [None] * 2),
    "windows": (windowed, partial(mistral, sliding_window=9), [6] * 2, [61] * 2),
    "long windows": (partial(mistral, sliding_window=100), partial(mistral, sliding_window=200), [100] * 2, [207] * 2),
    "one long window": (
        partial(mistral, sliding_window=100),
        partial(mistral, sliding_window=None),
        [100] * 2,
        [107] * 2,
    ),
    "RoPE in one layer": (smollm3, with_rope_in_layer_1, [None, 1, None], [None, 61, None]),
    "slowest frequency": (partial(llama, max_position_embeddings=4096), with_another_slow_plane, "any", [4096] * 2),
    **{
        f"sections of {name}": (partial(multimodal, name, one), partial(multimodal, name, two), "any", [32769] * 2)
        for name, one, two in (
            ("Qwen2_5_VLText", [4, 2, 2], [2, 3, 3]),
            ("Qwen3VLText", [4, 2, 2], [3, 3, 2]),
            ("Ernie4_5_VLMoeText", [3, 3, 2], [2, 2, 4]),
        )
    },
    "scaling": (llama, partial(llama, rope_parameters=SCALINGS["dynamic"]), [1] * 2, [513] * 2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_models_differ_from_a_distance_on(name):
    one, two, distance, length = PAIRS[name]
    result = audit(one(), two())
    distance = [each for each in result.distance if each] if distance == "any" else distance
    assert list(result.distance) == distance
    assert list(result.length) == length
    frame = result.to_frame()
    assert frame.differs_from_distance.isna().tolist() == [each is None for each in distance]
    differing = [layer for layer, each in enumerate(distance) if each is not None]
    text = f"they differ first in layer {differing[0]}" if differing else "the same positions in every layer"
    assert text in str(result)


def test_the_first_keys_share_and_the_change_are_those_of_the_models_own_attention():
    ids = tokens(1, 20)
    models = [llama(rope_parameters={"rope_theta": base}, attn_implementation="eager") for base in (1e4, 100.0)]
    with torch.no_grad():
        one, two = (model(ids, output_attentions=True).attentions for model in models)
    result = audit(*models, input_ids=ids)
    shares = [row.first_key for row in result.audits[0].layers]
    assert shares == pytest.approx([float(each[0, :, 1:, 0].mean()) for each in one], abs=1e-6)
    expected = [float((x - y).abs().sum(-1).mean() / 2) for x, y in zip(one, two, strict=True)]
    assert result.change == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("position", [None, 0, 61, 300])
def test_tables_that_differ_do_so_at_the_input(position):
    one, two = gpt2(300), gpt2(400 if position == 300 else 300)
    with torch.no_grad():
        two.wpe.weight[:300] = one.wpe.weight
        if position in (0, 61):
            two.wpe.weight[position] += 0.1
    result = audit(one, two)
    assert result.input_position == position
    assert result.input_differs == (f"differ at the input, from position {position} on" in str(result))
    assert result.input_differs == (position is not None)


# ---- what is refused


REFUSED = {
    "layers": (ValueError, "2 x 4 x 61 and 1 x 4 x 61", lambda: audit(llama(), llama(num_hidden_layers=1))),
    "positions": (ValueError, "2 x 2 x 61 and 2 x 2 x 39", lambda: audit(gpt2(), gpt2(40))),
    "one position": (ValueError, "at least 7 positions", lambda: audit(gpt2(1))),
    "six positions": (ValueError, "at least 7 positions", lambda: audit(gpt2(6))),
    "no model": (TypeError, "got Linear", lambda: audit(nn.Linear(2, 2))),
    "no softmax": (ValueError, "no softmax", lambda: audit(small("Mamba", num_hidden_layers=1))),
    "texts": (ValueError, "one sequence", lambda: audit(llama(), input_ids=torch.ones(2, 3, dtype=torch.long))),
    "a token": (ValueError, "one sequence", lambda: audit(llama(), input_ids=torch.ones(1, dtype=torch.long))),
    "ids": (ValueError, r"0\.\.96", lambda: audit(llama(), input_ids=[1, 2, 99])),
    "a function": (ValueError, "no num_hidden_layers", lambda: audit(AttentionFunction(lambda ids: [], 97))),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_audited_is_refused(what):
    error, message, call = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


# ---- what an audit leaves behind


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_model_is_left_as_it_was(interrupted):
    def interrupt(module, args):
        raise KeyboardInterrupt

    model = llama().train()
    before = state(model)
    if interrupted:
        handle = model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            audit(model)
        handle.remove()
    else:
        assert [row.positions for row in audit(model).layers] == [("rotary, base 10000",) * 2] * 2
    assert same(before, state(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("measure", [audit, lambda model: positional_attention(model, length=96, words=2)])
@pytest.mark.parametrize("first", [0, 40])
def test_rotations_that_grow_with_the_input_are_left_as_they_were(measure, first):
    def grown():
        model = llama(max_position_embeddings=32, rope_parameters=SCALINGS["dynamic"], num_hidden_layers=1)
        if first:
            model(tokens(1, first))
        return model

    model, ids = grown(), tokens(1, 48)
    with torch.no_grad():
        before = state(model)
        measure(model)
        assert same(before, state(model))
        torch.testing.assert_close(model(ids).last_hidden_state, grown()(ids).last_hidden_state, rtol=0, atol=0)
