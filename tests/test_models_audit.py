"""Audits find what is wrong in models that run without an error, and nothing in models that are right."""

import sys
import types

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import AttenuatedEncoding, NoEncoding, attach, audit
from pelocality.models import AttentionFunction, positional_attention
from pelocality.models.auditing.families import declarations
from tests.families import FAMILIES, VARIANTS, same, state, tiny, tiny_any, tokens

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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


def llama(seed=0, **more):
    return build(hf.LlamaConfig(**SMALL | more), seed)


def build(config, seed=0, head=False):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return (hf.AutoModelForCausalLM if head else hf.AutoModel).from_config(config).eval()


def test_a_correct_model_has_no_mismatch_and_is_left_as_it_was():
    model = llama().train()
    before = state(model)
    result = audit(model)
    assert result.mismatches == ()
    assert [row.positions for row in result.layers] == [("rotary, base 10000",) * 2] * 4
    assert same(before, state(model))


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_known_families_have_no_mismatch(name):
    result = audit(tiny(name))
    assert result.mismatches == ()
    assert all(row.positions[0] != "undeclared" for row in result.layers)


# ---- what goes wrong in practice, one by one


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scaling_is_measured(scaling):
    result = audit(llama(rope_parameters=SCALINGS[scaling]))
    assert result.mismatches == ()
    assert scaling in result.layers[0].positions[1]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_dropped_scaling_is_found(scaling):
    model = llama(rope_parameters=SCALINGS[scaling])
    model.rotary_emb = llama().rotary_emb
    found = audit(model).mismatches
    assert any(
        f"declared rotary scaling {scaling} (factor" in line and line.endswith("measured none") for line in found
    )


def test_a_scaling_by_another_factor_is_named():
    model = llama(rope_parameters=SCALINGS["linear"])
    model.rotary_emb = llama(rope_parameters=SCALINGS["linear"] | {"factor": 2.0}).rotary_emb
    result = audit(model)
    assert result.mismatches == ("layers 0-3: declared rotary scaling linear (factor 4), measured linear (factor 2)",)
    assert result.layers[0].positions[1] == "rotary, base 10000, linear (factor 2)"


def test_angles_of_no_known_form_are_not_called_what_was_declared():
    model = llama(rope_parameters=SCALINGS["linear"])
    model.rotary_emb = llama(rope_parameters=SCALINGS["longrope"] | {"attention_factor": 1.0}).rotary_emb
    result = audit(model)
    assert result.layers[0].positions == ("rotary, base 10000, linear (factor 4)", "rotary")
    (line,) = result.mismatches
    assert line.endswith("declared rotary, base 10000, linear (factor 4), measured other angles from position 1 on")


def test_a_base_that_fell_back_is_found():
    model = llama(rope_parameters={"rope_theta": 1e6})
    model.rotary_emb = llama().rotary_emb
    assert audit(model).mismatches == ("layers 0-3: declared rotary base 1000000, measured 10000",)


def test_a_base_in_one_layer_is_found_there():
    model = llama(rope_parameters={"rope_theta": 1e6})
    other, attention = llama().rotary_emb, model.layers[3].self_attn

    def turned_otherwise(module, args, kwargs):
        return args, kwargs | {"position_embeddings": other(kwargs["hidden_states"], kwargs["position_ids"])}

    attention.register_forward_pre_hook(turned_otherwise, with_kwargs=True)
    assert audit(model).mismatches == ("layer 3: declared rotary base 1000000, measured 10000",)


def test_an_unknown_base_is_named():
    model = llama()
    model.rotary_emb = llama(rope_parameters={"rope_theta": 25_000.0}).rotary_emb
    assert audit(model).mismatches == ("layers 0-3: declared rotary base 10000, measured 25000",)


def test_a_missing_attention_factor_is_found():
    model = llama(rope_parameters=YARN)
    model.rotary_emb.attention_scaling = 1.0
    assert audit(model).mismatches == ("layers 0-3: declared attention factor 1.139, measured 1",)


def test_another_share_of_rotated_dimensions_is_found():
    phi = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    options = SMALL | {"num_key_value_heads": 4}
    model = build(hf.PhiConfig(**options, rope_parameters=phi))
    whole = build(hf.PhiConfig(**options, rope_parameters=phi | {"partial_rotary_factor": 1.0}))
    model.rotary_emb = whole.rotary_emb
    for layer in model.layers:
        layer.self_attn.rotary_ndims = 8
    assert "declared 4 rotated dimensions of 8, measured 8" in audit(model).mismatches[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 16])
def test_alibi_in_half_precision_or_from_a_rounded_table_is_as_declared(heads, dtype):
    sizes = {"vocab_size": 99, "hidden_size": 16 * heads}
    for config in (
        hf.BloomConfig(n_layer=2, n_head=heads, **sizes),
        hf.FalconConfig(num_hidden_layers=2, num_attention_heads=heads, alibi=True, **sizes),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = hf.AutoModel.from_config(config, dtype=dtype).eval()
        assert audit(model).mismatches == ()
        model.config.update({"n_head" if config.model_type == "bloom" else "num_attention_heads": 2 * heads})
        assert any("slopes of" in line for line in audit(model).mismatches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config_class", [hf.GlmConfig, hf.CohereConfig])
def test_neighbouring_dimensions_that_are_rotated_in_half_precision_are_as_declared(config_class, dtype):
    config = config_class(**SMALL | {"hidden_size": 256, "num_attention_heads": 4})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert audit(hf.AutoModel.from_config(config, dtype=dtype).eval()).mismatches == ()


def test_a_table_of_equal_rows_is_found():
    model = build(hf.GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64))
    torch.nn.init.zeros_(model.wpe.weight)
    result = audit(model)
    assert result.mismatches == ("layers 0-1: declared learned positions, measured the same row at every position",)
    assert result.layers[0].positions == ("learned", "none")


@pytest.mark.parametrize("last", [0, 20, 37])
def test_positions_that_stop_at_a_row_are_found(last):
    model = tiny("bert")
    model.embeddings.position_ids.clamp_(max=last)
    sentence = f"declared row {last + 1} of the table at position {last + 1}, measured row {last}"
    if last == 0:
        sentence = "declared learned positions, measured none"
    assert audit(model).mismatches == (f"layers 0-2: {sentence}",)


def gpt2_of(positions):
    return build(hf.GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=positions))


def test_all_rows_of_a_table_are_looked_at():
    model = gpt2_of(300)
    assert audit(model).mismatches == ()
    model.wpe.register_forward_pre_hook(lambda module, args: (args[0].clamp(max=200),))
    assert audit(model).mismatches == ("layers 0-1: declared row 201 of the table at position 201, measured row 200",)


def test_equal_vectors_at_two_positions_are_found():
    model = gpt2_of(300)
    with torch.no_grad():
        model.wpe.weight[250] = model.wpe.weight[7]
    sentence = "declared learned positions, measured the same vector at positions 7 and 250"
    assert audit(model).mismatches == (f"layers 0-1: {sentence}",)


def test_a_table_with_too_few_rows_is_found():
    model = build(hf.OPTConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32,
                               max_position_embeddings=128, word_embed_proj_dim=32))  # fmt: skip
    model.decoder.embed_positions.weight = nn.Parameter(model.decoder.embed_positions.weight[:100].detach())
    (line,) = audit(model).mismatches
    assert line == "layers 0-1: declared 128 positions, but a table of 100 rows has no row 100"


# ---- with a mask, which every tokenizer passes


def in_runs_with_a_mask(model, padded):
    """Return a list that holds True while the model runs with a mask, which has padding if wanted."""
    given = [False]

    def note(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        given[0] = mask is not None and (not padded or not bool(mask.all()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return given


MASKS = {
    False: ("with an attention mask", "before padding on the right", "behind padding on the left"),
    True: ("before padding on the right", "behind padding on the left"),
}


@pytest.mark.parametrize("padded", MASKS)
def test_slopes_that_are_lost_with_a_mask_are_found(padded):
    model = ALIBI["bloom"]()
    given = in_runs_with_a_mask(model, padded)
    with_alibi(model, lambda alibi: alibi * (not given[0]))
    assert audit(model).mismatches == tuple(
        f"layers 0-1: {name}: measured other logits than without a mask from distance 1 on" for name in MASKS[padded]
    )


@pytest.mark.parametrize(
    ("window", "sentence"), [(None, "window none, without a mask 6"), (4, "window 4, without a mask 6")]
)
def test_a_window_that_is_lost_with_a_mask_is_found(window, sentence):
    model = mistral(6)
    given = in_runs_with_a_mask(model, False)

    def masked(module, args, kwargs):
        n = kwargs["hidden_states"].shape[1]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = (distance >= 0) & (distance < (window or n))
        mask = torch.zeros(n, n).masked_fill(~seen, -1e9)[None, None]
        return args, kwargs | ({"attention_mask": mask} if given[0] else {})

    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    assert audit(model).mismatches == tuple(f"layers 0-3: {name}: measured {sentence}" for name in MASKS[False])


def test_another_first_row_with_a_mask_is_found():
    model = gpt2_of(64)
    given = in_runs_with_a_mask(model, False)
    model.wpe.register_forward_pre_hook(lambda module, args: (args[0] + given[0] * (args[0].amax() < 63),))
    assert "layers 0-1: with an attention mask: measured from row 1, without one from row 0" in audit(model).mismatches


def test_an_error_that_is_not_of_positions_is_no_mismatch():
    config = hf.BartConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=3, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    result = audit(hf.BartForCausalLM(config).eval())
    assert result.mismatches == ()
    (caution,) = result.cautions
    assert caution.startswith("behind padding on the left nothing was measured: the model raises IndexError: ")


def test_a_padding_id_outside_the_vocabulary_is_no_mismatch():
    model = gpt2(head=True)
    model.config.pad_token_id = 1000
    assert audit(model).mismatches == ()


# ---- angles that depend on the length


@pytest.mark.parametrize("most", [7, 20, 29, 40, 61])
def test_dynamic_scaling_of_few_positions_is_as_declared_also_after_a_long_text(most):
    model = llama(max_position_embeddings=most, rope_parameters=SCALINGS["dynamic"])
    assert audit(model).mismatches == ()
    model(tokens(1, 200))
    ids = tokens(1, 90)
    before = model(ids).last_hidden_state
    assert audit(model).mismatches == ()
    torch.testing.assert_close(model(ids).last_hidden_state, before, rtol=0, atol=0)


def test_angles_that_differ_at_far_positions_alone_are_found():
    model = llama(max_position_embeddings=4096)
    rotary = model.rotary_emb
    rotary.inv_freq[-1] *= 1.05
    (line,) = audit(model).mismatches
    assert "measured other angles from position " in line
    rotary.inv_freq[-1] /= 1.05
    rotary.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"].clamp(max=1000)}),
        with_kwargs=True,
    )
    (line,) = audit(model).mismatches
    assert 1000 < int(line.split()[-2]) < 1400


def test_frequencies_cast_to_half_precision_are_found():
    model = llama(rope_parameters={"rope_theta": 5e5}, head_dim=32)
    assert audit(hf.AutoModel.from_config(model.config, dtype=torch.bfloat16)).mismatches == ()
    (line,) = audit(model.bfloat16()).mismatches  # casts the frequencies, which from_config keeps in float32
    assert "measured other angles from position" in line


def test_keys_that_are_turned_otherwise_than_queries_are_found(monkeypatch):
    from transformers.models.llama import modeling_llama

    both = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s, *a, **b: (both(q, k, c, s)[0], both(q, k, c, -s)[1])
    )
    # in the other direction: what a wrong sign does
    found = audit(llama()).mismatches
    assert found == ("layers 0-3: queries and keys are rotated by different angles",)


def neighbours_rotated(q, k, cos, sin, *args, **kwargs):
    """Rotate neighbouring dimensions, as GPT-J does, by Llama's angles."""
    cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for each in (cos, sin))
    return tuple(x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))


HALVES, NEIGHBOURS = "both halves (as in Llama)", "neighbouring dimensions (as in GPT-J)"
WRONG_ROTATIONS = {
    "queries are rotated by position, keys are not": lambda right: lambda q, k, *a, **b: (right(q, k, *a, **b)[0], k),
    "keys are rotated by position, queries are not": lambda right: lambda q, k, *a, **b: (q, right(q, k, *a, **b)[1]),
    "declared rotation by positive angles, measured negative angles": lambda right: (
        lambda q, k, cos, sin, *a, **b: right(q, k, cos, -sin, *a, **b)
    ),
    f"declared pairs of dimensions from {HALVES}, measured pairs of {NEIGHBOURS}": lambda right: neighbours_rotated,
}


@pytest.mark.parametrize("sentence", WRONG_ROTATIONS)
def test_a_rotation_of_one_side_alone_backwards_or_of_other_pairs_is_found(sentence, monkeypatch):
    from transformers.models.llama import modeling_llama

    right = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", WRONG_ROTATIONS[sentence](right))
    assert f"layers 0-3: {sentence}" in audit(llama()).mismatches


@pytest.mark.parametrize("name", ["Cohere", "Ernie4_5", "Glm", "GPTJ", "Helium", "NanoChat"])
def test_families_of_other_pairs_or_direction_have_no_mismatch(name):
    result = audit(build(getattr(hf, f"{name}Config")(**SMALL, head_dim=8, rotary_dim=4)))
    assert result.mismatches == ()
    assert "rotary" in result.layers[0].positions[1]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Ernie4_5", f"declared pairs of {NEIGHBOURS}, measured pairs of dimensions from {HALVES}"),
        ("NanoChat", "declared rotation by negative angles, measured positive angles"),
    ],
)
def test_a_rotation_as_in_llama_is_found_in_families_with_another(name, sentence, monkeypatch):
    from transformers.models.llama import modeling_llama

    model = build(getattr(hf, f"{name}Config")(**SMALL))
    for function in ("apply_rotary_pos_emb", "rotate_half"):
        monkeypatch.setattr(sys.modules[type(model).__module__], function, getattr(modeling_llama, function))
    assert audit(model).mismatches == (f"layers 0-3: {sentence}",)


def test_hunyuan_4_rotates_neighbours():
    class LikeHunyuan(hf.LlamaConfig):
        model_type = "hy_v4_vl_text"  # since transformers 5.24

    sentence = f"declared pairs of {NEIGHBOURS}, measured pairs of dimensions from {HALVES}"
    assert audit(hf.LlamaModel(LikeHunyuan(**SMALL)).eval()).mismatches == (f"layers 0-3: {sentence}",)


def test_lara_mini_rotates_in_windows_alone():
    class LikeLara(hf.Exaone4Config):
        model_type = "lara_mini"  # since transformers 5.24

    kinds = ["sliding_attention", "full_attention"] * 2
    result = audit(hf.Exaone4Model(LikeLara(**SMALL, layer_types=kinds, sliding_window=6)).eval())
    assert result.mismatches == ()
    assert [row.positions[0] for row in result.layers] == ["rotary, base 10000", "none"] * 2


@pytest.mark.parametrize("name", ["inkling_text", "inkling2_text", "inkling2_loop_text"])
def test_inkling_is_known_to_have_relative_terms(name):
    config = types.SimpleNamespace(model_type=name)
    assert declarations(config).relative_terms(config)


def test_keys_that_are_zero_are_not_said_to_lack_a_rotation():
    model = llama()
    for layer in model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    assert audit(model).mismatches == ()


def test_pairs_and_direction_of_a_model_type_unknown_to_transformers_are_not_judged(monkeypatch):
    from transformers.models.llama import modeling_llama

    class OwnConfig(hf.LlamaConfig):
        model_type = "own-llama"

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", neighbours_rotated)
    assert audit(hf.LlamaModel(OwnConfig(**SMALL)).eval()).mismatches == ()


@pytest.mark.parametrize("most", [700_000, 1_048_576])  # the second position of the far run is then 4 or 5
def test_a_million_declared_positions_are_as_declared(most):
    assert audit(llama(max_position_embeddings=most)).mismatches == ()


def without_rope(attention):
    """Give an attention module angles of zero."""

    def unrotated(module, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    attention.register_forward_pre_hook(unrotated, with_kwargs=True)


def nope_models():
    smollm3 = build(hf.SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1, 1]))
    cohere2 = build(
        hf.Cohere2Config(
            **SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"] + ["sliding_attention"] * 2
        )
    )
    llama4 = build(
        hf.Llama4TextConfig(
            **SMALL, no_rope_layers=[1, 0, 1, 1], attention_chunk_size=6, intermediate_size_mlp=16, num_local_experts=2,
            head_dim=8,
        )
    )  # fmt: skip
    return {"smollm3": smollm3, "cohere2": cohere2, "llama4": llama4}


@pytest.mark.parametrize("name", ["smollm3", "cohere2", "llama4"])
def test_a_layer_without_positions_is_measured(name):
    result = audit(nope_models()[name])
    assert result.mismatches == ()
    assert [row.positions[1] for row in result.layers] == [
        "none"
        if layer == 1
        else f"rotary, base {500000 if name == 'llama4' else 10000 if name == 'cohere2' else 2000000}"
        for layer in range(4)
    ]


def use_rope(model, name, layer, used):
    attention = model.layers[layer].self_attn
    if name == "cohere2":
        attention.sliding_window = 6 if used else None
    else:
        attention.use_rope = used


@pytest.mark.parametrize("name", ["smollm3", "cohere2", "llama4"])
def test_rope_on_a_layer_declared_to_have_none_is_found(name):
    model = nope_models()[name]
    use_rope(model, name, 1, True)
    (line,) = audit(model).mismatches
    assert line.startswith("layer 1: declared no rotation, measured rotary, base ")


@pytest.mark.parametrize("name", ["smollm3", "cohere2", "llama4"])
def test_no_rope_on_a_layer_declared_to_have_it_is_found(name):
    model = nope_models()[name]
    use_rope(model, name, 2, False)
    (line,) = audit(model).mismatches
    assert line.startswith("layer 2: declared rotary base ")
    assert line.endswith("measured no rotation")


def mistral(window, **more):
    return build(hf.MistralConfig(**SMALL, sliding_window=window, **more))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [4, 100])
def test_an_ignored_window_is_found(window, implementation):
    model = mistral(window, attn_implementation=implementation)
    assert audit(model).mismatches == ()
    assert audit(model).layers[0].window == (str(window), str(window))
    with_mask(model, lambda distance: distance >= 0)
    assert audit(model).mismatches == (f"layers 0-3: declared window {window}, measured none",)


def with_mask(model, visible):
    """Give the layers another mask than the model builds."""

    def masked(module, args, kwargs):
        position = torch.arange(kwargs["hidden_states"].shape[1])
        seen = visible(position[:, None] - position)
        return args, kwargs | {"attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9)[None, None]}

    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)


@pytest.mark.parametrize("run", [5, 7])
def test_a_window_off_by_one_is_found(run):
    model = mistral(6)
    with_mask(model, lambda distance: (distance >= 0) & (distance < run))
    assert audit(model).mismatches == (f"layers 0-3: declared window 6, measured {run}",)


def test_a_window_in_both_directions_off_by_one_is_found():
    model = tiny("modernbert")
    assert {row.window for row in audit(model).layers} == {("3 to either side",) * 2, ("none", "none")}
    local = [layer for layer, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]

    def masked(module, args, kwargs):
        position = torch.arange(args[0].shape[1])
        seen = (position[:, None] - position).abs() <= 4
        return args, kwargs | {"attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9)[None, None]}

    model.layers[local[0]].attn.register_forward_pre_hook(masked, with_kwargs=True)
    assert audit(model).mismatches == (
        f"layer {local[0]}: declared window 3 to either side, measured 4 to either side",
    )


def test_a_chunk_of_another_size_is_found():
    model = nope_models()["llama4"]
    assert [row.window[1] for row in audit(model).layers] == ["chunks of 6", "none", "chunks of 6", "chunks of 6"]
    chunk = torch.arange(256) // 7

    def masked(module, args, kwargs):
        n = kwargs["hidden_states"].shape[1]
        seen = (chunk[:n, None] == chunk[:n]) & torch.ones(n, n, dtype=torch.bool).tril()
        return args, kwargs | {"attention_mask": torch.zeros(n, n).masked_fill(~seen, -1e9)[None, None]}

    model.layers[0].self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    assert audit(model).mismatches == ("layer 0: declared window chunks of 6, measured chunks of 7",)


def falcon():
    return build(hf.FalconConfig(vocab_size=97, hidden_size=36, num_hidden_layers=2, num_attention_heads=6, alibi=True))


ALIBI = {
    "bloom": lambda: build(hf.BloomConfig(vocab_size=97, hidden_size=36, n_layer=2, n_head=6)),
    "mpt": lambda: build(hf.MptConfig(vocab_size=97, d_model=36, n_layers=2, n_heads=6, max_seq_len=256)),
    "falcon": falcon,
}


@pytest.mark.parametrize("name", ALIBI)
def test_slopes_are_measured(name):
    (row, _) = audit(ALIBI[name]()).layers
    assert row.mismatches == ()
    assert row.positions[1].startswith("ALiBi, slopes ")


def test_slopes_of_another_number_of_heads_are_found(monkeypatch):
    from transformers.models.bloom import modeling_bloom

    slopes = modeling_bloom._get_alibi_slopes
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda heads, device: slopes(8, device)[:heads])
    (line,) = audit(ALIBI["bloom"]()).mismatches
    assert line == "layers 0-1: declared ALiBi slopes of 6 heads (0.5 to 0.003906), measured those of 8 heads"


WRONG_SLOPES = {
    "slope 0.25 in head 0, measured 0.0625, the same slopes in another order": lambda slopes: slopes.roll(-1),
    "slope 0.25 in head 0, measured 0.003906, the same slopes in another order": lambda slopes: slopes.flip(0),
    "slope 0.0625 in head 1, measured 0.05": lambda slopes: torch.where(slopes == 0.0625, 0.05, slopes),
}


@pytest.mark.parametrize("sentence", WRONG_SLOPES)
def test_a_slope_of_another_head_is_named(sentence, monkeypatch):
    from transformers.models.bloom import modeling_bloom

    right = modeling_bloom._get_alibi_slopes
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda *args: WRONG_SLOPES[sentence](right(*args)))
    model = build(hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    assert audit(model).mismatches == (f"layers 0-1: declared ALiBi {sentence}",)


def with_alibi(model, change):
    """Give the attention modules of a BLOOM another bias."""

    def changed(module, args, kwargs):
        return args, kwargs | {"alibi": change(kwargs["alibi"])}

    for block in model.h:
        block.self_attention.register_forward_pre_hook(changed, with_kwargs=True)


def test_a_bias_that_is_not_proportional_to_distance_is_not_called_none():
    model = ALIBI["bloom"]()
    with_alibi(model, lambda alibi: alibi.clamp(max=2))
    (line,) = audit(model).mismatches
    assert line == "layers 0-1: declared ALiBi, measured a bias that does not fall in proportion to distance"


def test_missing_slopes_are_found(monkeypatch):
    from transformers.models.bloom import modeling_bloom

    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads))
    assert "measured none" in audit(ALIBI["bloom"]()).mismatches[0]


def test_buckets_of_another_farthest_distance_are_found():
    model = tiny("t5")
    assert audit(model).layers[0].positions == ("32 buckets", "32 buckets")
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance = 20
    (line,) = audit(model).mismatches
    assert line.startswith("layers 0-2: declared 32 buckets, measured others from distance ")


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_learned_positions_shifted_by_the_padding_offset_are_found(name):
    model = tiny(name)
    assert audit(model).layers[0].positions[1].startswith("learned from row 2")
    ids = torch.arange(40)
    model.embeddings.create_position_ids_from_input_ids = lambda given, *_: ids[: given.shape[1]].expand(given.shape)
    found = audit(model).mismatches
    assert "layers 0-2: declared positions from row 2 of the table, measured from row 0" in found


def test_opt_without_its_offset_is_found():
    model = build(hf.OPTConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32,
                               max_position_embeddings=64, word_embed_proj_dim=32))  # fmt: skip
    assert audit(model).mismatches == ()
    model.decoder.embed_positions.offset = 0
    first, *padded = audit(model).mismatches
    assert first == "layers 0-1: declared positions from row 2 of the table, measured from row 0"
    assert padded[-1] == "layers 0-1: behind padding on the left: a table of 66 rows has no row -1"


@pytest.mark.parametrize("make", [llama, lambda: tiny("gpt2").float()], ids=["llama", "gpt2"])
def test_a_causal_mask_lost_under_a_float_mask_is_found(make):
    model = make()
    assert audit(model).mismatches == ()
    bias = torch.zeros(1, 1, 1, 1)

    def biased(module, args, kwargs):
        n = kwargs.get("hidden_states", args[0] if args else None).shape[1]
        mask = kwargs.get("attention_mask")
        return args, kwargs | {"attention_mask": bias.expand(1, 1, n, n) if mask is None else mask + bias}

    layers = model.layers if hasattr(model, "layers") else model.h
    for layer in layers:
        (layer.self_attn if hasattr(layer, "self_attn") else layer.attn).register_forward_pre_hook(
            biased, with_kwargs=True
        )
    last = len(layers) - 1
    assert audit(model).mismatches == (f"layers 0-{last}: declared causal, measured attention to later keys",)


def gpt2(head):
    config = hf.GPT2Config(
        vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return build(config, head=head)


def test_positions_counted_through_left_padding_are_found_in_generation():
    class Forgetful(hf.GPT2LMHeadModel):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            inputs.pop("position_ids")
            return inputs

    assert audit(gpt2(head=True)).mismatches == ()
    found = audit(Forgetful(gpt2(head=True).config)).mismatches
    assert found == ("layers 0-1: declared positions counted from the first token, measured through left padding",)


def test_positions_counted_through_left_padding_are_found_where_the_model_counts_tokens():
    model = tiny("roberta")
    ids = torch.arange(2, 42)
    model.embeddings.create_position_ids_from_input_ids = lambda given, *_: ids[: given.shape[1]].expand(given.shape)
    assert audit(model).mismatches == (
        "layers 0-2: declared positions counted from the first token, measured through left padding",
    )


def test_a_base_model_that_counts_through_padding_is_cautioned_about():
    result = audit(gpt2(head=False))
    assert result.mismatches == ()
    assert "position_ids" in result.cautions[0]
    assert result.notes == (*result.mismatches, *result.cautions)


# ---- what an audit shows


def gpt_oss():
    return build(hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6))


def test_learned_sinks_are_measured():
    model = gpt_oss()
    with torch.no_grad():
        model.layers[1].self_attn.sinks.fill_(50.0)
    result = audit(model)
    assert result.mismatches == ()
    assert result.layers[1].sinks == pytest.approx(1, abs=1e-3)
    assert 0 < result.layers[0].sinks < 0.5
    assert "sinks" in result._table().columns


def test_the_first_keys_share_is_that_of_the_models_own_attention():
    model = llama(attn_implementation="eager")
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    shares = [row.first_key for row in audit(model, input_ids=ids).layers]
    assert shares == pytest.approx([float(each[0, :, 1:, 0].mean()) for each in maps], abs=1e-6)


def test_layers_of_a_hybrid_have_the_models_numbers():
    result = audit(tiny_any("jamba"))
    assert [(row.layer, row.positions[1]) for row in result.layers] == [
        (0, "linear_attention"), (1, "none"), (2, "linear_attention"), (3, "none"),
    ]  # fmt: skip
    assert result.mismatches == ()


def test_a_block_that_runs_several_times_is_held_to_its_own_declaration():
    model = build(hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=5))  # sliding, full, sliding, full
    looped = model.layers[0]  # runs again after block 2, so that the full attention of block 3 is the fifth
    model.layers[2].register_forward_hook(
        lambda block, args, kwargs, states: looped(states, **kwargs), with_kwargs=True
    )
    result = audit(model)
    assert [row.window for row in result.layers] == [(size, size) for size in ("5", "none", "5", "5", "none")]
    assert result.mismatches == ()


def test_each_half_of_an_encoder_decoder_model_is_audited():
    config = hf.BartConfig(
        vocab_size=97, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = build(config)
    halves = [audit(half) for half in (model, model.get_decoder())]
    assert [half.mismatches for half in halves] == [(), ()]
    assert [half.layers[0].causal for half in halves] == [(False, False), (True, True)]


def test_an_audit_is_a_text_a_page_and_a_frame():
    model = mistral(6)
    with_mask(model, lambda distance: (distance >= 0) & (distance < 7))
    result = audit(model)
    assert "MistralModel: 4 layers, 1 mismatch" in str(result)
    assert "layers 0-3: declared window 6, measured 7" in str(result)
    assert "<p>layers 0-3: declared window 6, measured 7</p>" in result._repr_html_()
    frame = result.to_frame()
    assert frame.window_declared.tolist() == ["6"] * 4
    assert frame.window_measured.tolist() == ["7"] * 4
    assert frame.mismatches.tolist() == ["declared window 6, measured 7"] * 4


@pytest.mark.parametrize("name", ["bert", "xlnet", "gpt_oss"])
def test_the_softmax_of_an_attached_encoding_is_not_a_layer(name):
    model = (tiny_any if name == "gpt_oss" else tiny)(name)
    layers = len(audit(model).layers)
    attach(model, AttenuatedEncoding(decay=0.3), position_embeddings="keep")
    found = audit(model)
    assert len(found.layers) == layers
    assert "nothing was measured" not in str(found)


def test_an_attached_encoding_is_named_and_its_removed_positions_are_found():
    model = llama()
    with attach(model, NoEncoding()):
        result = audit(model)
    assert "with NoEncoding attached" in str(result)
    assert result.mismatches == ("layers 0-3: declared rotary base 10000, measured no rotation",)
    assert audit(model).mismatches == ()


def test_windows_that_are_longer_than_the_model_are_not_called_right_or_wrong():
    result = audit(mistral(20_000))
    assert result.mismatches == ()
    assert result.cautions == ("windows of 20000 were not reached with 61 positions",)


# ---- two models


def test_equal_models_do_not_differ():
    result = audit(llama(), llama())
    assert result.distance == (None,) * 4
    assert result.change == (0,) * 4
    assert "the same positions in every layer" in str(result)


def test_two_models_part_where_their_windows_do():
    result = audit(mistral(6), mistral(9))
    assert result.distance == (6,) * 4
    assert all(change > 0.01 for change in result.change)
    assert "they differ first in layer 0, at distances of 6 and more" in str(result)


def test_two_models_part_at_the_layer_that_has_rope_in_one():
    one, two = nope_models()["smollm3"], nope_models()["smollm3"]
    two.layers[1].self_attn.use_rope = True
    result = audit(one, two)
    assert result.distance == (None, 1, None, None)
    assert result.change[0] == 0 < result.change[1]
    frame = result.to_frame()
    assert frame.positions_a[1] == "none"
    assert frame.positions_b[1] == "rotary, base 2000000"


def test_the_change_of_attention_is_the_total_variation():
    a, b = (llama(rope_parameters={"rope_theta": base}, attn_implementation="eager") for base in (1e4, 100.0))
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = [model(ids, output_attentions=True).attentions for model in (a, b)]
    expected = [float((x - y).abs().sum(-1).mean() / 2) for x, y in zip(*maps, strict=True)]
    assert audit(a, b, input_ids=ids).change == pytest.approx(expected, abs=1e-6)


def test_tables_that_differ_part_at_the_input():
    one, two = tiny("bert"), tiny("bert")
    with torch.no_grad():
        two.embeddings.position_embeddings.weight += 0.1
    result = audit(one, two)
    assert result.input_differs
    assert "differ at the input, from position 0 on" in str(result)


def test_whole_tables_are_compared():
    one, two, longer = gpt2_of(300), gpt2_of(300), gpt2_of(400)
    assert audit(one, two).input_position is None
    with torch.no_grad():
        two.wpe.weight[61] += 0.1
        longer.wpe.weight[:300] = one.wpe.weight
    assert audit(one, two).input_position == 61
    assert audit(one, longer).input_position == 300
    assert "differ at the input, from position 300 on" in str(audit(one, longer))


def test_angles_of_long_texts_are_compared():
    result = audit(llama(), llama(rope_parameters=SCALINGS["dynamic"]))
    assert result.distance == (1,) * 4
    assert result.length == (513,) * 4
    assert "they differ first in layer 0, at distances of 1 and more in 513 positions" in str(result)
    assert result.to_frame().differs_in_length.tolist() == [513] * 4


def test_angles_that_differ_at_far_positions_alone_are_compared():
    one, two = (llama(max_position_embeddings=4096) for _ in range(2))
    two.rotary_emb.inv_freq[-1] *= 1.02  # of the slowest plane
    result = audit(one, two)
    assert None not in result.distance
    assert result.length == (4096,) * 4


@pytest.mark.parametrize("other", [None, 200])
def test_windows_beyond_the_compared_logits_are_compared(other):
    result = audit(mistral(100), mistral(other))
    assert result.distance == (100,) * 4


def test_models_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="the same layers, heads and positions, got 4 x 4 x 61 and 2 x 4 x 61"):
        audit(llama(), llama(num_hidden_layers=2))


# ---- what is refused


def test_models_with_other_numbers_of_positions_are_refused():
    longer = build(hf.BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=3, num_attention_heads=2))
    with pytest.raises(ValueError, match="the same layers, heads and positions, got 3 x 2 x 39 and 3 x 2 x 61"):
        audit(tiny("bert"), longer)


@pytest.mark.parametrize("positions", [1, 2, 5, 6])
def test_a_model_with_too_few_positions_is_refused(positions):
    model = build(hf.GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=positions))
    with pytest.raises(ValueError, match=r"GPT2Model .* cannot be audited: .* at least 7 positions"):
        audit(model)
    model.wpe = nn.Embedding(7, 16)
    model.config.n_positions = 7
    assert audit(model).mismatches == ()


def test_a_factor_from_a_hook_on_the_angles_is_found():
    model = llama()
    model.rotary_emb.register_forward_hook(lambda module, args, output: tuple(2 * each for each in output))
    assert audit(model).mismatches == ("layers 0-3: declared attention factor 1, measured 2",)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="got Linear"):
        audit(nn.Linear(2, 2))


def test_a_model_without_attention_is_refused():
    model = build(hf.MambaConfig(vocab_size=97, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"MambaModel .* cannot be audited: it computed no softmax"):
        audit(model)


@pytest.mark.parametrize("ids", [torch.ones(2, 3, dtype=torch.long), torch.ones(1, dtype=torch.long)])
def test_other_than_one_sequence_is_refused(ids):
    with pytest.raises(ValueError, match="one sequence of at least 2 tokens"):
        audit(llama(), input_ids=ids)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"0\.\.96"):
        audit(llama(), input_ids=[1, 2, 99])


def test_an_interrupted_audit_leaves_the_model_as_it_was():
    model = llama().train()
    before = state(model)
    handle = model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        audit(model)
    handle.remove()
    assert same(before, state(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode_stack() == []


def interrupt(module, args):
    raise KeyboardInterrupt


def test_positions_computed_at_the_input_are_seen():
    config = hf.PegasusXConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    result = audit(build(config).get_decoder())
    assert result.layers[0].positions == ("sinusoidal", "computed at the input")
    assert result.mismatches == ()


def test_a_function_of_attention_alone_is_refused():
    function = AttentionFunction(lambda ids: [torch.ones(len(ids), 1, 9, 9) / 9], 97)
    with pytest.raises(ValueError, match="AttentionFunction cannot be audited: its configuration has no num_hidden"):
        audit(function)


def dynamic_rotary():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return hf.LlamaModel(
        hf.LlamaConfig(vocab_size=97, max_position_embeddings=32, rope_parameters=scaling, **sizes)
    ).eval()


@pytest.mark.parametrize("measure", [audit, lambda model: positional_attention(model, length=96, words=2)])
@pytest.mark.parametrize("first", [0, 40])
def test_rotations_that_grow_with_the_input_are_left_as_they_were(measure, first):
    model, ids = dynamic_rotary(), tokens(1, 48)
    with torch.no_grad():
        if first:
            model(tokens(1, first))
        before = state(model)
        measure(model)
        assert same(before, state(model))
        found = model(ids).last_hidden_state
        fresh = dynamic_rotary()
        fresh.load_state_dict(model.state_dict())
        if first:
            fresh(tokens(1, first))
        torch.testing.assert_close(found, fresh(ids).last_hidden_state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Bart", "Marian", "Pegasus"])
def test_a_head_that_generates_declares_nothing_of_the_encoder_that_reads(kind):
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 97}
    name = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    model = getattr(hf, name)(getattr(hf, f"{kind}Config")(**sizes, pad_token_id=1, decoder_start_token_id=1)).eval()
    assert audit(model).mismatches == audit(model.model).mismatches == ()


@pytest.mark.parametrize(
    "options", [{"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 3}, {"penalty_alpha": 0.6}]
)
def test_the_users_way_of_generating_does_not_enter_the_audit(options):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 97}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)).eval()
    wanted = audit(model)
    model.generation_config = config = hf.GenerationConfig(**options, pad_token_id=0)
    assert audit(model).mismatches == wanted.mismatches
    assert model.generation_config is config
