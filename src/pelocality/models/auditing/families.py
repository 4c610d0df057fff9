"""What families declare of their positions where their configurations do not say so.

`audit` holds it against the running model: none of it is read from transformers' code as it runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

from pelocality.encodings.alibi import published_slopes


def head_size(config: Any) -> int:
    """Return d_head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class Declared:
    """The positions of a family, as far as its configuration leaves them unsaid.

    Attributes:
        absolute: The table at the input, "learned" or "sinusoidal", or None.
        has_table: Whether a configuration has that table.
        first_row: The row of it that the first token reads; None for the one after the padding id.
        counts_tokens: Whether positions are counted from the first token, padding left out.
        rotary_dims: The number of rotated dimensions, with base 10,000, where no option of the configuration gives it,
            or None.
        no_rotary_by_default: Whether a configuration without options for rotation has none; otherwise nothing is
            declared.
        rotary_only_in_windows: Whether layers without a window have no rotation where others have one.
        layout: Which dimensions are rotated as a pair: "half" for i and i + d / 2 (Llama), "interleaved" for neighbours
            (GPT-J), in queries and keys as they enter the product; None where nothing says.
        direction: 1 where the first of a pair is rotated towards the second, -1 for the reverse; None likewise.
        slopes: The slopes of ALiBi (head,), or None.
        relative_terms: Whether content meets embeddings of distances; None where nothing says.
        causal: Whether queries see no later key; None where nothing says.
    """

    absolute: str | None = None
    has_table: Callable[[Any], bool] = lambda config: True
    first_row: int | None = 0
    counts_tokens: bool = False
    rotary_dims: Callable[[Any], int | None] = lambda config: None
    no_rotary_by_default: bool = False
    rotary_only_in_windows: bool = False
    layout: str | None = "half"
    direction: int | None = 1
    slopes: Callable[[Any], Tensor | None] = lambda config: None
    relative_terms: Callable[[Any], bool | None] = lambda config: False
    causal: Callable[[Any], bool | None] = lambda config: None

    def table(self, config: Any) -> tuple[str, int] | None:
        """Return the table at the input of a configuration, and the row of it that the first token reads, or None."""
        if self.absolute is None or not self.has_table(config):
            return None
        return self.absolute, int(config.pad_token_id) + 1 if self.first_row is None else self.first_row


def _mpt_slopes(config: Any) -> Tensor | None:
    """Return the slopes of MPT, which are those of a power of two heads, every second one first."""
    if not config.attn_config.alibi:
        return None
    heads, most = config.n_heads, config.attn_config.alibi_bias_max
    power = 2 ** math.ceil(math.log2(heads))
    every = 2.0 ** (-most * torch.arange(1, power + 1, dtype=torch.float64, device="cpu") / power)
    return every if power == heads else torch.cat([every[1::2], every[::2]])[:heads]


def _falcon_slopes(config: Any) -> Tensor | None:
    """Return the slopes of Falcon, which are added before the logits are scaled."""
    return published_slopes(config.num_attention_heads) / math.sqrt(head_size(config)) if config.alibi else None


_LEARNED, _SINUSOIDAL = Declared("learned"), Declared("sinusoidal")
_INTERLEAVED = Declared(layout="interleaved")
_FROM_TWO, _AFTER_PADDING = replace(_LEARNED, first_row=2), replace(_LEARNED, first_row=None, counts_tokens=True)
_DEBERTA = replace(
    _LEARNED,
    has_table=lambda config: getattr(config, "position_biased_input", True),
    relative_terms=lambda config: bool(config.relative_attention),
)

_GROUPS: tuple[tuple[str, Declared], ...] = (
    (
        "albert bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small bros clip_text_model "
        "convbert distilbert dpr electra ernie git gpt-sw3 gpt2 gpt_bigcode gpt_neo imagegpt layoutlm megatron-bert "
        "mobilebert mra openai-gpt rembert roc_bert splinter squeezebert tapas vilt visual_bert",
        _LEARNED,
    ),
    ("bart biogpt mbart mvp nystromformer plbart yoso", _FROM_TWO),
    ("mpnet opt", replace(_FROM_TWO, counts_tokens=True)),
    (
        "camembert data2vec-text ibert layoutlmv3 lilt luke markuplm roberta roberta-prelayernorm xlm-roberta "
        "xlm-roberta-xl xmod",
        _AFTER_PADDING,
    ),
    (
        "esm",
        replace(
            _AFTER_PADDING,
            has_table=lambda config: config.position_embedding_type == "absolute",
            rotary_dims=lambda config: head_size(config) if config.position_embedding_type == "rotary" else None,
        ),
    ),
    ("ctrl marian pegasus pegasus_x tipsv2_text_model", _SINUSOIDAL),
    ("xglm", replace(_SINUSOIDAL, first_row=2)),
    ("m2m_100 nllb-moe", replace(_SINUSOIDAL, first_row=None, counts_tokens=True)),
    ("xlm flaubert", replace(_LEARNED, causal=lambda config: bool(config.causal))),
    ("deberta deberta-v2", _DEBERTA),
    ("xlnet", Declared(relative_terms=lambda config: True, causal=lambda config: bool(config.attn_type == "uni"))),
    ("inkling_text inkling2_text inkling2_loop_text", Declared(relative_terms=lambda config: True)),
    ("prophetnet", Declared(relative_terms=lambda config: None)),  # only the decoder has relative terms
    ("gptj codegen", replace(_INTERLEAVED, rotary_dims=lambda config: config.rotary_dim or head_size(config))),
    ("roformer", replace(_INTERLEAVED, rotary_dims=head_size)),
    (
        "cohere deepseek_v2 deepseek_v4 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text glm glm4 glm4v_text glm_ocr_text "
        "helium hy_v4_vl_text llama4_text moonshine moonshine_streaming openai_privacy_filter",
        _INTERLEAVED,
    ),
    ("nanochat", Declared(direction=-1)),
    ("jamba kimi_linear nemotron_h zamba", Declared(no_rotary_by_default=True)),
    ("afmoe exaone4 exaone_moe flint kolibri1 lara_mini", Declared(rotary_only_in_windows=True)),
    ("cohere2 cohere2_moe", replace(_INTERLEAVED, rotary_only_in_windows=True)),
    ("bloom", Declared(slopes=lambda config: published_slopes(config.n_head))),
    ("falcon", Declared(slopes=_falcon_slopes)),
    ("mpt", Declared(slopes=_mpt_slopes)),
)
_BY_TYPE = {model_type: declared for types, declared in _GROUPS for model_type in types.split()}
_NOTHING, _UNKNOWN = Declared(), Declared(layout=None, direction=None)


def declarations(config: Any) -> Declared:
    """Return what the family of a configuration declares."""
    return _BY_TYPE.get(config.model_type, _NOTHING if config.model_type in CONFIG_MAPPING_NAMES else _UNKNOWN)
