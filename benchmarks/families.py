"""Every model type of transformers that reads text, tiny, with random weights: measured, attached, audited or refused?

    python -m benchmarks.families                       # all types; a second call goes on where the first one stopped
    python -m benchmarks.families --types llama bert    # these alone, printed and not written

A second program, which finds and runs the model as the library does, computes each result on its own:

- measured: every matrix of `positional_attention` against the softmaxes of the model's own run, intercepted in torch;
- attached: in float64, the outputs with an encoding beside the model's positions against those of the model without it,
  the same bias added to the argument of every softmax; "keeps its own": `attach` proves no encoding in their place;
- rotary: whether `attach` proves rotations of other frequencies in each layer, and in each head;
- audited: whether `audit` finds what the configuration declares. The models are as transformers builds them.

Writes a CSV with a row per type, and a page with the same as a table.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from benchmarks.attaching import off_by
from pelocality import AttenuatedEncoding, NoEncoding, RotaryEncoding, attach, audit, positional_attention
from pelocality.models import SequenceModel
from pelocality.models.attaching.installing import batch_for, find_places, own_rotations

VOCABULARY, LENGTH, WORDS = 99, 13, [7, 30]
_LARGEST = 2e7  # parameters: larger ones are models whose sizes have other names

# sizes by the name of an option, at any depth of a configuration
_SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        VOCABULARY: "vocab_size char_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input",
        32: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size input_embedding_size "
        "output_embedding_size word_embed_proj_dim projection_dim hidden_dim dim_model d_embed n_embed "
        "backbone_hidden_size hidden_size_per_layer_input out_hidden_size intermediate_size ffn_dim d_ff d_inner "
        "n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff block_ff_dim mlp_hidden_size lru_width "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size attention_intermediate_size "
        "dense_intermediate_size expert_ffn_hidden_size intermediate_size_mlp moe_shared_expert_intermediate_size "
        "moe_latent_size prefix_dense_intermediate_size",
        3: "num_hidden_layers n_layer n_layers num_layers depth",
        2: "encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_key_value_heads "
        "num_experts_per_tok moe_k top_k_experts type_vocab_size linear_num_key_heads linear_num_value_heads "
        "index_n_heads",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts rotary_dim",
        8: "head_dim d_head d_kv kv_channels attention_head_size global_head_dim dim_head attention_head_dim head_size "
        "swa_head_dim v_head_dim swa_v_head_dim qk_rope_head_dim qk_nope_head_dim mamba_d_head mamba_headdim "
        "mamba_head_dim ssm_head_dim mamba_n_heads n_mamba_heads mamba_num_heads mamba_d_state ssm_state_size "
        "state_size linear_key_head_dim linear_value_head_dim patch_size index_head_dim",
        16: "q_lora_rank kv_lora_rank o_lora_rank image_size num_mel_bins mamba_chunk_size chunk_size",
        1: "n_group topk_group",
        128: "max_position_embeddings n_positions n_ctx max_seq_len max_2d_position_embeddings",
        6: "sliding_window window_size attention_window_size local_attention attention_chunk_size",
    }.items()
    for name in names.split()
} | {"attention_type": "original_full"}

# what these types need besides
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SECTIONS = _ROPE | {"mrope_section": [2, 1, 1]}
_WITH_SECTIONS = ("qwen2_vl_text", "qwen2_5_vl_text", "glm_ocr_text", "glm_image_text", "cosmos3_edge_text")
_WITH_ROPE = ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text")
_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _SECTIONS} for name in _WITH_SECTIONS},
    **{
        name: {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}}
        for name in ("glm4v_text", "glm4v_moe_text")
    },
    **{name: {"rope_parameters": _ROPE, "head_dim": 8} for name in _WITH_ROPE},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"pad_token_id": 1, "mask_token_id": 4, "vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "higgs_audio_v2": {"audio_token_id": 4, "audio_delay_token_id": 4},  # their default here is the id of padding
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 8},
    "neomme": {"head_dim": 16},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zaya": {"num_experts_per_tok": 1},
}
_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": None})


class NoTextError(ValueError):
    """A model that reads no tokens."""


def tiny_config(config_class: Any, options: dict[str, Any]) -> Any:
    """Return the configuration of a class with small sizes."""
    default = config_class()
    given: dict[str, Any] = {}
    for name in set(default.to_dict()) | set(inspect.signature(config_class.__init__).parameters):
        value = default.__dict__.get(name, default.to_dict().get(name))
        if name in getattr(config_class, "sub_configs", {}):
            if value is not None:
                given[name] = tiny_config(type(getattr(default, name)), {}).to_dict()
        elif name in _SIZES and type(value) in (int, str):
            given[name] = _SIZES[name]
        elif name.endswith("token_id") and (isinstance(value, list) or (type(value) is int and value >= VOCABULARY)):
            given[name] = 3
    kinds = getattr(default, "layer_types", None) or getattr(default, "layers_block_type", None) or ()
    if len(set(kinds)) > 1 and "num_hidden_layers" in given:
        given["num_hidden_layers"] = 8  # a period of the pattern
    return config_class(**given | options)


def tiny_model(model_type: str) -> Any:
    """Build a tiny model with random weights that runs on tokens.

    Raises:
        NoTextError: if the model reads no tokens.
        Exception: whatever transformers raises at the first attempt where none succeeds.
    """
    first: Exception | None = None
    for more in _VARIANTS:
        try:
            config = tiny_config(CONFIG_MAPPING[model_type], _OPTIONS.get(model_type, {}) | more)
            with torch.device("meta"):
                skeleton = AutoModel.from_config(config)
            if "input_ids" not in inspect.signature(skeleton.forward).parameters:
                raise NoTextError("it reads no tokens")
            size = sum(parameter.numel() for parameter in skeleton.parameters())
            if size > _LARGEST:
                raise ValueError(f"no small configuration: {size:.0f} parameters")
            torch.manual_seed(0)
            model = AutoModel.from_config(config).eval()
            tokens = {"input_ids": torch.randint(5, VOCABULARY, (1, LENGTH))}
            if config.is_encoder_decoder:
                tokens["decoder_input_ids"] = tokens["input_ids"]
            with torch.no_grad():
                model(**tokens)
            return model
        except NoTextError:
            raise
        except Exception as error:  # any of transformers' own
            first = first or error
    assert first is not None
    raise first


class Softmaxes(TorchFunctionMode):
    """Keeps the weights of every softmax over n keys (and sinks), and of torch's kernel, in the order of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.scaled_dot_product_attention and args[0].shape[-2] == args[1].shape[-2] == LENGTH:
            self.taken.append(torch.stack([self._of_text(i, args, kwargs) for i in range(len(args[0]))]))
        softmax = func in (nn.functional.softmax, torch.softmax, Tensor.softmax)
        if softmax and result.ndim > 2 and result.shape[-2] == LENGTH <= result.shape[-1]:
            self.taken.append(result.detach())
        return result

    @staticmethod
    def _of_text(text: int, args: Any, kwargs: Any) -> Tensor:
        """The attention of one text of a batch, query by query: (head, n, n)."""
        query, key, mask = args[0][text].double(), args[1][text].double(), kwargs.get("attn_mask")
        weights = torch.zeros(len(query), LENGTH, LENGTH, dtype=torch.float64)
        for head in range(len(query)):
            for i in range(LENGTH):
                scale = kwargs.get("scale") or query.shape[-1] ** -0.5
                logits = scale * (key[head * len(key) // len(query)] @ query[head, i])
                if kwargs.get("is_causal"):
                    logits[i + 1 :] = -torch.inf
                if mask is not None:
                    row = mask.expand(len(args[0]), len(query), LENGTH, LENGTH)[text, head, i]
                    logits = torch.where(row, logits, -torch.inf) if row.dtype == torch.bool else logits + row
                weights[head, i] = (logits - logits.max()).exp() / (logits - logits.max()).exp().sum()
        return weights


def measured_off(model: Any) -> float:
    """Measure a model, and return the largest difference from the softmaxes of its own run.

    Raises:
        AssertionError: if some matrix is none of these softmaxes.
    """
    result = positional_attention(model, length=LENGTH, words=WORDS, progress=False)
    known, total = SequenceModel(model), None
    for word in WORDS:
        with torch.no_grad(), Softmaxes() as softmaxes:
            known.run({"input_ids": torch.full((1, LENGTH), word)})
        maps = [weights.reshape(-1, *weights.shape[-2:])[..., :LENGTH].double() for weights in softmaxes.taken]
        maps = [weights / weights.sum(-1, keepdim=True) for weights in maps]  # without what goes to learned sinks
        total = maps if total is None else [a + b for a, b in zip(total, maps, strict=True)]
    own = [each / len(WORDS) for each in total or []]
    worst, start = 0.0, 0
    for matrix in result.attention.double():  # in the order of the run; other softmaxes may lie between
        offs = [float((matrix - each).abs().max()) if each.shape == matrix.shape else 1.0 for each in own[start:]]
        close = [place for place, off in enumerate(offs) if off < 1e-4]
        assert close, f"a matrix that is no softmax of the model (off by {min(offs, default=1):.2g})"
        worst, start = max(worst, offs[close[0]]), start + close[0] + 1
    return worst


def attached_off(model: Any) -> float:
    """Return by how much outputs with an encoding differ from those of the witness of `benchmarks.attaching`."""
    return off_by(model, disable=False)


def without_own_positions(model: Any) -> None:
    """Attach an encoding in place of the model's positions, which `attach` proves or refuses."""
    attach(model, NoEncoding()).remove()


def rotations(model: Any) -> list[tuple[RotaryEncoding, int]]:
    """Return a rotation for each attention module that may rotate, and the number of heads of its keys."""
    known = SequenceModel(model)
    inputs = batch_for(known, None)
    places = find_places(known, inputs)
    own = own_rotations(known, places, inputs)
    groups = [getattr(module, "num_key_value_groups", 1) for module in places]
    heads = [place.heads // size for place, size in zip(places.values(), groups, strict=True)]
    found = [(each, number) for each, number in zip(own, heads, strict=True) if each is not None]
    return found or [(RotaryEncoding(4), number) for number in heads]


def rotated(model: Any) -> str:
    """Attach rotations, which `attach` proves or refuses: other frequencies in each layer, and by head where it can."""
    every = rotations(model)
    attach(model, [each.scaled(0.8) for each, _ in every]).remove()
    by_head = [each.with_heads(heads).scaled([0.5 + head / heads for head in range(heads)]) for each, heads in every]
    try:
        attach(model, by_head).remove()
    except ValueError:
        return "yes"
    return "by head"


def cached_off(model: Any) -> float | None:
    """Return how far outputs with a cache are from those without one, with a bias and with a rotation.

    Returns:
        The largest difference, relative to the largest output; None for a model without a cache, or whose cache is not
        exact without an encoding either.
    """
    base = SequenceModel(model).module
    ids = torch.randint(6, 90, (1, LENGTH), generator=torch.Generator().manual_seed(2))

    def off() -> float:
        with torch.no_grad():
            whole = base(ids)[0][:, -3:]
            cache = base(ids[:, :-3], use_cache=True).past_key_values
            part = base(ids[:, -3:], past_key_values=cache, use_cache=True)[0]
        return float((part - whole).abs().max() / whole.abs().max())

    try:
        if not off() < 1e-5:
            return None
    except Exception:  # a model without a cache fails in its own way
        return None
    errors = []
    with suppress(ValueError), attach(model, AttenuatedEncoding(decay=0.3, causal=True)):
        errors.append(off())
    with suppress(ValueError), attach(model, [each.scaled(0.8) for each, _ in rotations(model)]):
        errors.append(off())  # what is refused has a column of its own
    return max(errors, default=None)


def outcome(function: Any, model: Any) -> tuple[str, Any]:
    """Return "yes" and the result, or "no" and the reason."""
    try:
        return "yes", function(model)
    except Exception as error:  # of any kind: the table says which
        wrong = "WRONG: " if isinstance(error, AssertionError) else ""
        expected = isinstance(error, ValueError | TypeError) or wrong
        name = "" if expected else f"{type(error).__name__}: "
        return "no", shortened(f"{wrong}{name}{error}".split("\n")[0].split("; known: ")[0])


def shortened(reason: str) -> str:
    """Return a reason of at most 200 characters, in whole words."""
    return textwrap.shorten(reason, 200, placeholder=" …")


def rows_of(model_type: str) -> list[dict[str, Any]]:
    """Return the row of a model type; of an encoder-decoder model one for each half."""
    row: dict[str, Any] = {"type": model_type, "built": "yes"}
    try:
        model = tiny_model(model_type)
    except Exception as error:
        reason = shortened(f"{error}".strip().split("\n")[-1])
        return [row | {"built": "no text" if isinstance(error, NoTextError) else "no", "reason": reason}]
    if not model.config.is_encoder_decoder:
        return [row | row_of(model)]
    decoder = tiny_model(model_type).get_decoder()
    return [row | row_of(model), row | {"type": f"{model_type} (decoder)"} | row_of(decoder)]


def row_of(model: Any) -> dict[str, Any]:
    """Return what can be done with a model, how exactly, and what is refused."""
    start = time.perf_counter()
    row: dict[str, Any] = {"class": type(model).__name__}
    reasons: dict[str, list[str]] = {}  # one for several refusals, where it is the same
    for name, function in (("measured", measured_off), ("audited", audit), ("attached", attached_off)):
        row[name], result = outcome(function, model)
        if row[name] == "no":
            reasons.setdefault(result, []).append(name)
        elif name == "audited":
            row["positions"] = "; ".join(dict.fromkeys(each.positions[1] for each in result.layers))
            row["mismatches"] = "; ".join(result.mismatches)
        else:
            row[f"{name}_off"] = result
            if result > 1e-5:
                reasons[f"WRONG: off by {result:.2g}"] = [name]
    if row["attached"] == "yes" and outcome(without_own_positions, model)[0] == "no":
        row["attached"] = "keeps its own"
    answer, how = outcome(rotated, model)
    row["rotated"], row["not_rotated"] = (how, "") if answer == "yes" else ("no", how)
    answer, off = outcome(cached_off, model)
    row["cached_off"] = off if answer == "yes" else None
    if answer == "yes" and (off or 0) > 1e-5:
        reasons[f"WRONG with a cache: {off}"] = ["cached"]
    row["reason"] = "; ".join(f"not {', '.join(names)}: {reason}" for reason, names in reasons.items())
    return row | {"seconds": round(time.perf_counter() - start, 2)}


_ABOUT = """The models are tiny and have random weights. A second program computes each result on its own. For measured
matrices it reads the softmaxes of the model's own run. For attached encodings it adds the bias to the arguments of the
softmaxes, in float64. An encoder-decoder model has two rows, and the first is its encoder.

- *keeps its own*: the encoding is attached only beside the model's positions, with `position_embeddings="keep"`,
  because `attach` cannot prove that these are disabled.
- rotary, *yes* or *by head*: the frequencies of a `RotaryEncoding` may differ between layers, or also between heads of
  keys.
- *learned from row 2*: the first rows of the table are for padding.
- *linear_attention*, *conv* and the like: layers without softmax attention. If layers differ, each kind is listed.
- *relative terms*, *computed at the input*, *queries scaled* or *queries change by position*: the kind of position is
  measured, but no formula.
- *queries not seen*: queries do not reach a function that the audit records."""


def summary(table: pd.DataFrame) -> str:
    """Return the counts in one sentence."""
    built = table[table.built == "yes"]
    counts = {name: int((built[name] != "no").sum()) for name in ("measured", "attached", "audited")}
    kept = int((built.attached == "keeps its own").sum())
    wrong = int(built.reason.fillna("").str.contains("WRONG").sum())
    differ = ", ".join(built.type[built.mismatches.fillna("") != ""])
    return (
        f"{len(built)} of {len(table)} models built on tokens ({int((table.built == 'no text').sum())} read none, "
        f"{int((table.built == 'no').sum())} have no small configuration here): {counts['measured']} measured, "
        f"{counts['attached']} attached ({kept} only beside their own positions), "
        f"{counts['audited']} audited, {wrong} wrong; mismatches: {differ or 'none'}"
    )


def in_short(built: pd.DataFrame) -> str:
    """Return how many model types are measured, and how many take an encoding."""
    types = built.type.str.split(" ").str[0]
    numbers = {name: types[built[name] != "no"].nunique() for name in ("measured", "attached", "audited")}
    rotary, by_head = (types[built.rotated.isin(kinds)].nunique() for kinds in (("yes", "by head"), ("by head",)))
    return (
        f"{types.nunique()} model types read text and could be built small. {numbers['measured']} of them are "
        f"measured on identical words, {numbers['attached']} take an encoding, {rotary} take a rotary encoding "
        f"({by_head} by head), and {numbers['audited']} are audited. The table has the reasons for the others."
    )


def page(table: pd.DataFrame) -> str:
    """Return the table as a page of the documentation."""
    built = table[table.built == "yes"].fillna("")
    lines = [
        "# Every family",
        "",
        f"**In short.** {in_short(built)}",
        "",
        "```bash\npython -m benchmarks.families\n```",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}: {summary(table)}.",
        "",
        _ABOUT,
        "",
        "| type | measured | attached | rotary | audited: positions | refused, or differs |",
        "|---|---|---|---|---|---|",
    ]
    for row in built.to_dict("records"):
        notes = " / ".join(note for note in (row["mismatches"], row["reason"]) if note).replace("|", "/")
        cells = [row[name] for name in ("type", "measured", "attached", "rotated")]
        cells += [row["positions"] or row["audited"], notes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def swept(path: Path, rows_of_type: Callable[[str], list[dict[str, Any]]]) -> pd.DataFrame:
    """Return the rows of all model types, written to a table after each; those that it has are not made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    done = {row["type"] for row in rows}
    for model_type in tqdm([each for each in sorted(MODEL_MAPPING_NAMES) if each not in done]):
        rows += rows_of_type(model_type)
        pd.DataFrame(rows).to_csv(path.with_suffix(".part"), index=False)
        path.with_suffix(".part").replace(path)  # never half a file
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--types", nargs="+", help="model types; by default all")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of families.csv and families.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    pd.set_option("display.width", 200, "display.max_colwidth", 120)
    if arguments.types:
        for model_type in arguments.types:
            print(pd.DataFrame(rows_of(model_type)).T.to_string(header=False), end="\n\n")
        return
    table = swept(arguments.output / "families.csv", rows_of)
    (arguments.output / "families.md").write_text(page(table))
    print(table[table.built == "yes"][["type", "measured", "attached", "audited", "reason"]].to_string(index=False))
    print(summary(table))


if __name__ == "__main__":
    main()
