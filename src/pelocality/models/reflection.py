"""Does a model know which way a sentence runs? The theorem behind the paper's flaw of symmetry, as a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._run import check_length, check_reads_tokens, device_of, eager_attention, reads_tokens
from pelocality.models._weights import check_ids
from pelocality.models.families import architecture, known_families
from pelocality.models.families._wrapper import pretrained


def reflection_gap(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    r"""Measure how far a model is from reversing its output when its input is reversed.

    $$\mathrm{gap}(x) = \frac{\lVert F(x) - R F(R x) \rVert}{\lVert F(x) \rVert + \lVert R F(R x) \rVert}$$

    with $F(x)$ the last hidden states of the tokens $x$ and $R$ the reversal of their order. The definition is ours.

    Attention whose logits are those of content plus a bias that is a function of $\lvert i - j \rvert$ commutes with
    $R$, and so does everything in a transformer that acts on each token alone. So a bidirectional model whose only
    sense of position is a symmetric encoding (the paper's s = 1) has gap 0, whatever it was trained on: what it makes
    of "dog bites man" is what it makes of "man bites dog", read backwards, and nothing that treats all positions alike
    can tell them apart. Any asymmetry breaks that: s other than 1, a causal mask, learned absolute positions.

    Args:
        model: A transformers model, with or without a task head; of an encoder-decoder model the encoder is measured.
        input_ids: (batch, n), or (n,) for one sequence; a batch may be empty. Special tokens are reversed like all
            others.
        attention_mask: As input_ids, 1 for tokens and 0 for padding; tokens are reversed among themselves and padding
            stays where it is. None: all are tokens.

    Returns:
        (batch,), float64, in [0, 1]: 0 where the model is reflection-equivariant, up to the rounding of its precision
        (about 1e-7 in float32), or where all its hidden states are 0; NaN where they hold NaN or infinity. The model is
        left as it was.

    Raises:
        TypeError: No transformers model, ids that are no integers, or a mask that holds neither integers nor booleans.
        ValueError: Ids or a mask of another shape, ids outside the vocabulary, more of them than the model has
            positions for, or a sequence that is padding alone.

    Note:
        Hidden states share a large common part, so a gap well below 1 is a large one. Compare models, and with
        ``attach(model, encoding)`` symmetries, on the same tokens.

    Examples:
        >>> from pelocality.models import attach
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
        >>> bert = BertModel(config).double()
        >>> ids = torch.tensor([7, 9, 8])
        >>> with attach(bert, AttenuatedEncoding(symmetry=1.0)):
        ...     bool(reflection_gap(bert, ids) < 1e-12)
        True
        >>> with attach(bert, AttenuatedEncoding(symmetry=0.5)):
        ...     bool(reflection_gap(bert, ids) < 1e-12)
        False
    """
    ids, mask = _checked(input_ids, attention_mask)
    base = _base(model)
    _check_fit(base, ids)
    ids, mask = ids.to(device_of(base)), mask.to(device_of(base))
    if not len(ids):  # most models cannot run an empty batch
        return torch.zeros(0, dtype=torch.float64, device=ids.device)
    order = _reversed_among_tokens(mask)
    with eager_attention(model):
        forward = _hidden_states(base, ids, mask)
        backward = _hidden_states(base, ids.gather(1, order), mask)
    backward = backward.gather(1, order[..., None].expand_as(backward))
    tokens = mask[..., None]
    difference, one, other = (
        torch.linalg.vector_norm((states * tokens).double(), dim=(1, 2))
        for states in (forward - backward, forward, backward)
    )
    total = one + other
    return torch.where(total == 0, 0, difference / total)  # two outputs of nothing but zeros are equal


def _checked(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if given is None and name == "attention_mask":
            continue
        if not isinstance(given, Tensor) or given.is_floating_point():
            kind = f"a tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"{name} must be a tensor of integers, got {kind}; tokenizer(text, return_tensors='pt')")
    if input_ids.dtype == torch.bool:
        raise TypeError("input_ids must be a tensor of integers, got one of booleans; is it the attention mask?")
    if input_ids.ndim not in (1, 2) or input_ids.shape[-1] == 0:
        raise ValueError(f"input_ids must be (batch, n) or (n,), got shape {tuple(input_ids.shape)}")
    ids = input_ids.reshape(-1, input_ids.shape[-1]).long()
    if attention_mask is None:
        return ids, torch.ones_like(ids)
    shape, wanted = tuple(attention_mask.shape), tuple(input_ids.shape)
    if shape != wanted:
        raise ValueError(f"attention_mask must be shaped like input_ids, {wanted}, got shape {shape}")
    mask = attention_mask.reshape(ids.shape)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must be 1 for tokens and 0 for padding, and holds something else")
    if not bool(mask.any(1).all()):
        raise ValueError("attention_mask must leave every sequence a token, and one has none")
    return ids, mask.long()


def _check_fit(base: Any, ids: Tensor) -> None:
    check_ids(base, ids)
    try:
        check_length(base, ids.shape[1])
    except ValueError as error:
        raise ValueError(f"input_ids are too long: {error}") from None


def _base(model: nn.Module) -> Any:
    inner = pretrained(model)
    if inner.config.model_type in known_families():
        return architecture(inner).base(inner)
    base = inner.base_model
    if inner.config.is_encoder_decoder:
        base = base.get_encoder()
        if not reads_tokens(base):
            raise ValueError(f"the encoder of {type(inner).__name__} cannot be run on tokens by itself")
    check_reads_tokens(base)
    return base


def _hidden_states(base: Any, ids: Tensor, mask: Tensor) -> Tensor:
    padded = {} if bool(mask.all()) else {"attention_mask": mask}
    states: Tensor = base(input_ids=ids, **padded, return_dict=True).last_hidden_state
    return states


def _reversed_among_tokens(mask: Tensor) -> Tensor:
    """Return where each position of the reversed sequences comes from, (batch, n)."""
    order = torch.arange(mask.shape[1], device=mask.device).repeat(len(mask), 1)
    for row, tokens in zip(order, mask.bool(), strict=True):
        row[tokens] = row[tokens].flip(0)
    return order
