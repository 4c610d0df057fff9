"""Attaching encodings to a model, and removing them again."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from torch import nn
from transformers import PreTrainedModel

from pelocality._checks import check_choice, described, flag
from pelocality._distributed import fully_sharded, refuse_sharded, several_processes
from pelocality.encodings import Encoding, NoEncoding, RotaryEncoding
from pelocality.encodings.base import check_encoding
from pelocality.models._inference import inference
from pelocality.models._restore import restoring, restoring_on_error
from pelocality.models.attaching.installing import Plan, fitted, reading, remove
from pelocality.models.attaching.proof import fit_rotations, prove_encodings
from pelocality.models.attaching.saving import save_encodings
from pelocality.models.attaching.submodule import Place
from pelocality.models.families import ATTACHED, attached_biases
from pelocality.models.layers import requested_layers
from pelocality.models.sequence_model import SequenceModel

Positions = Literal["disable", "keep"]


@dataclass(frozen=True)
class Attachment:
    """The encodings attached to a model, with the method that removes them; leaving the outermost with-statement does.

    Attributes:
        model: The model that was given to `attach`.
        encodings: The attached copies, one per attention module in the order in which these run. Train these copies.
        position_embeddings: Whether the model's position embeddings are disabled: ``"disable"`` or ``"keep"``.
    """

    model: nn.Module
    encodings: tuple[Encoding, ...]
    position_embeddings: Positions
    _key: str
    _blocks: list[None] = field(default_factory=list, init=False, compare=False)  # that it is entered by

    def __repr__(self) -> str:
        differing = ", ".join(dict.fromkeys(map(repr, self.encodings)))
        kept = "disabled" if self.position_embeddings == "disable" else "kept"
        model = type(self.model).__name__
        return f"Attachment({len(self.encodings)} layers of {model}: {differing}; position embeddings {kept})"

    def remove(self) -> None:
        """Remove the encodings and enable the model's position embeddings again.

        No weight of the model changes. A second call does nothing.
        """
        model = _attached_model(self.model, self._key)
        if model is not None and self._is_attached():
            with restoring(functools.partial(remove, model)):
                pass

    def save(self, folder: str | Path) -> None:
        """Write the encodings into a folder, such as that of the model's own weights; `load` attaches them again.

        Args:
            folder: The folder, which is made if there is none. Its file ``pelocality.safetensors`` is overwritten.
        """
        save_encodings(self.model, folder)

    def _is_attached(self) -> bool:
        """Return whether one of the encodings, or a copy that peft trains, is in the model."""
        model = _attached_model(self.model, self._key)
        return model is not None and any(each.key == self._key for each in model.encodings)

    def __enter__(self) -> Self:
        if not self._is_attached():
            raise ValueError("the encodings of this attachment were removed; call attach again")
        self._blocks.append(None)
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop()
        if not self._blocks:  # an inner block leaves the encodings to the outer one
            self.remove()


def attach(
    model: nn.Module | SequenceModel,
    encoding: Encoding | Sequence[Encoding],
    *,
    position_embeddings: Positions = "disable",
    prove: bool = True,
    example_inputs: Any = None,
    layers: Sequence[int] | None = None,
    disable: Sequence[str] = (),
) -> Attachment:
    r"""Attach an encoding to every layer of a model.

    $$\mathrm{attention} = \mathrm{softmax}(\mathrm{logits} + \mathrm{bias})$$

    with the encoding's bias for the number of queries and keys in the call. The model is changed in place, and the
    encoding is copied. Padding and causal masks still apply, and encodings that normalise over keys get them. So a
    sentence has the same output with and without padding, and a prefix has the same output with and without the tokens
    after it.

    Args:
        model: A transformers model, with or without a task head; or any module, with ``example_inputs``. In an
            encoder-decoder model, the encoder is changed; pass ``model.get_decoder()`` to change the decoder. In a
            hybrid, the attention layers are changed, and in a model of images and text, the language model.
        encoding: One encoding, copied for every layer, or a list with one encoding per layer. Layers that share their
            weights (ALBERT) share their encoding, so the list has one encoding per group. An encoding with one head
            serves all heads. A `RotaryEncoding` replaces the rotation of a rotary model or image tower; in any other
            model, it rotates queries and keys. `CoPE` needs torch's kernel (``"sdpa"``).
        position_embeddings: ``"disable"``: the model's position embeddings have no effect. Then only the encoding gives
            the order of the tokens, and inputs may be longer than the table of positions. ``"keep"``: the encoding is
            added to the position embeddings.
        prove: Whether to run the model on a few tokens first, as it is and with trial encodings. If one of these checks
            fails, there is an error: a bias of zero changes no output; any other bias enters the logits of every
            attention layer exactly; hidden keys (padding or the future) stay hidden; with positions disabled and all
            masks opened, the order of tokens has no effect (in a hybrid, on its attention layers); after removal the
            outputs are those before. Without a proof, the model is run once, to find its attention.
        example_inputs: For any module except a transformers model of token ids: a batch that the module reads (a
            tensor, a tuple or a dict). `attach` finds the attention on this batch, and proves the bias on it. A model
            of images and a `SequenceModel` with ``inputs`` take noise if it is left out.
        layers: The layers that get the encoding, by their number in the order in which they run; by default all.
        disable: For such a module: the names of its parts or parameters that hold positions, such as ``["pos_embed"]``.
            They return zeros while the encoding is attached. The rotation of a transformers model of images needs no
            name.

    Returns:
        The handle. Its ``.remove()`` undoes everything. As a context manager, the handle undoes everything on leaving.

    Raises:
        TypeError: ``model`` is not a module, or it is not a transformers model and there are no ``example_inputs``;
            ``encoding`` is not an encoding, or it could not be saved.
        ValueError: A model for which a check failed, or to which the bias cannot be added exactly; an attention
            implementation other than ``"eager"`` and ``"sdpa"``; weights on the meta device; a wrong number of heads or
            layers; a symmetry for a causal model; a model with adapters of peft, or with an encoding already attached;
            a model sharded over processes, unless by ``fully_shard`` and with an encoding without parameters.

    Note:
        A sliding window or a causal mask is not a position embedding. It remains when positions are disabled, and the
        output depends on the order of tokens through it. Under ``"sdpa"``, a call that asks for attention weights
        raises an error, because that kernel does not return weights. Under ``DistributedDataParallel``, pass
        ``find_unused_parameters=True`` when positions are disabled, because their weights are unused. Compiled models
        of this process are compiled again.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> with attach(bert, AttenuatedEncoding(heads=2, decay=0.2, symmetry=0.5)) as attachment:
        ...     [encoding.decay for encoding in attachment.encodings]
        [tensor([0.2000, 0.2000]), tensor([0.2000, 0.2000])]
    """
    flag("prove", prove)
    check_choice("position_embeddings", position_embeddings, get_args(Positions))
    disables, subject = position_embeddings == "disable", _attachable(model, example_inputs)
    rotary = _is_rotary(encoding)
    first: Any = next(iter(encoding), None) if isinstance(encoding, Sequence) else encoding
    positions = getattr(first, "positions", None)  # in images, tokens without a place are the model's own
    tokens = getattr(positions, "shape", (0, 0))[1] + getattr(positions, "before", 0) * (not subject.adds_tokens)
    length = (first.length if rotary else tokens) or getattr(subject.content, "number", None)
    plan = Plan(subject, disables, tuple(disable), example_inputs)
    plan = plan.on_model(rotary=rotary, prove=prove or rotary, length=length)
    encodings = _copies(plan, encoding, layers)
    learned = any(next(each.parameters(), None) is not None for each in encodings if each is not None)
    if learned and several_processes() and fully_sharded(plan.model.given) is not None:
        raise ValueError(f"{plan.model} is sharded, and would not share the gradient of encoding; attach it before")
    if rotary:
        plan = fit_rotations(plan, encodings)
    elif prove:
        prove_encodings(plan)
    with restoring_on_error(functools.partial(remove, plan.model)):
        plan.install(encodings, disable=disables)
        if prove or rotary or any(hasattr(each, "positions") for each in encodings):
            with inference(plan.model.module):  # an encoding that does not fit the attention refuses it
                plan.model.run(plan.inputs)
        own = tuple(each for each in encodings if each is not None)
        return Attachment(plan.model.given, own, position_embeddings, plan.key)


def _attachable(model: Any, example_inputs: Any) -> SequenceModel:
    """Return the model that gets an encoding; refuse one with adapters, or with an encoding already."""
    try:
        subject = SequenceModel.of(model)
    except (TypeError, ValueError):
        if example_inputs is None:
            raise
        subject = reading(model, example_inputs)  # any module that reads no token ids
    refuse_sharded(subject.given)
    _check_adapters(subject.given)
    if subject.encodings or any(each.record is None for each in attached_biases(subject.given)):
        raise ValueError(f"{subject} has an encoding attached already; remove it first: attached(model).remove()")
    return subject


def _is_rotary(encoding: Any) -> bool:
    """Return whether encodings are rotations; refuse what is no encoding, and some of several that are rotations."""
    every = encoding if isinstance(encoding, Sequence) else [encoding]
    rotary = {isinstance(each, RotaryEncoding) for each in every}
    if not all(isinstance(each, Encoding) for each in every) or len(rotary) > 1:
        rule = "a pelocality Encoding, or a list of one per layer, rotary for all layers or for none"
        raise TypeError(f"encoding must be {rule}, got {described(encoding)}")
    return rotary == {True}


def _copies(plan: Plan, encoding: Any, layers: Sequence[int] | None) -> list[Any]:
    """Return a copy of the encoding for each place, checked against it; no encoding, or none at all, for the others."""
    every = range(len(plan.places))
    rotating = [number for number in every if not plan.replaces or plan.own[number] is not None]
    numbers = requested_layers(layers, rotating, len(every), f"in which {plan.model} rotates queries and keys")
    encodings = [encoding] * len(numbers) if isinstance(encoding, Encoding) else encoding
    if len(encodings) != len(numbers):
        rule = f"one, or a list of {len(numbers)}, one per layer that does not share its weights"
        raise ValueError(f"encoding must be {rule}, got a list of {len(encodings)}")
    by_number = dict(zip(numbers, encodings, strict=True))
    modules = list(plan.places)
    shared = any(getattr(module, "is_kv_shared_layer", False) for module in modules)
    if plan.replaces and shared and len(numbers) < len(rotating):
        raise ValueError(f"layers of {plan.model} share their keys, so each needs an encoding; leave layers out")
    for number, each in by_number.items():
        _check_fit(each, modules[number], plan.places[modules[number]], plan.own[number])
    default = None if plan.replaces else NoEncoding()
    return fitted(plan, [by_number.get(number, default) for number in every])


def _check_fit(encoding: Encoding, module: nn.Module, place: Place, own: RotaryEncoding | None) -> None:
    """Refuse an encoding with other heads or dimensions than attention, or with arguments that would have no effect."""
    rotates = isinstance(encoding, RotaryEncoding)
    check_encoding(encoding, place.heads // (getattr(module, "num_key_value_groups", 1) if rotates else 1))
    reasons = []
    if rotates and encoding.causal and not place.causal:
        reasons.append("causal=True, but a rotation hides nothing, and this model is bidirectional")
    if own is not None and encoding.dim != own.dim:
        reasons.append(f"dim={encoding.dim}, but the model rotates {own.dim} dimensions")
    paired: Any = own and [(each.interleaved, each.pairs) for each in (encoding, own)]
    if own is not None and paired[0] not in ((False, None), paired[1]):
        reasons.append("interleaved=True or pairs, but dimensions are paired as the model does when attached")
    axes = 1 if own is None else own.axes
    if rotates and encoding.axes not in ((axes,) if place.waves else (1, axes)):
        reasons.append(f"axes={encoding.axes}, but tokens of the model have {axes}")
    if own is not None and encoding.length not in (None, own.length) and place.waves:
        reasons.append(f"length={encoding.length}, but the first encoding, or the model, has {own.length}")
    for part in encoding.modules() if place.causal else ():
        if isinstance(part, Encoding) and not part.causal and part.future_only is not None:
            advice = "leave it at its default, and do not learn it"
            name = f"{part.future_only} of {type(part).__name__}"
            reasons.append(f"{name}, which acts on future keys only, and this model hides these; {advice}")
    if reasons:
        raise ValueError(f"encoding must fit the model, and {type(encoding).__name__} has {'; '.join(reasons)}")


def attached(model: nn.Module | SequenceModel) -> Attachment | None:
    """Return the handle of a model with encodings attached, also of a copy or a loaded model.

    Args:
        model: The model that was given to `attach`, a copy of it, or the `SequenceModel` of either.

    Returns:
        The handle, or None if nothing is attached.

    Raises:
        TypeError: ``model`` is not a module.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> attached(bert) is None
        True
    """
    module = model.given if isinstance(model, SequenceModel) else model
    subject = _attached_model(module)
    if subject is None or not subject.encodings:
        return None
    position_embeddings: Positions = "disable" if subject.positions_disabled else "keep"
    own = tuple(bias.encoding for bias in subject.encodings)
    return Attachment(module, own, position_embeddings, subject.encodings[0].key)


def _attached_model(module: nn.Module, key: str | None = None) -> SequenceModel | None:
    """Return the model to which encodings are attached: any module, or the bare transformer in it; None without any.

    Beside those of a transformer, encodings may be attached to another part of a module, such as an image tower.
    """
    biases = attached_biases(module) if isinstance(module, nn.Module) else []
    biases = [bias for bias in biases if key in (None, bias.key)]
    if biases and all(bias.record is None for bias in biases):
        return reading(module)
    return SequenceModel(module) if biases or not isinstance(module, nn.Module) else None


def _check_adapters(model: Any) -> None:
    """Refuse a model with adapters of peft around it or in it: they would be saved without the encoding."""
    if isinstance(model, PreTrainedModel):
        adapted = [model] if model._hf_peft_config_loaded else []
        way = "to model.base_model" if model.base_model is not model else "after model.delete_adapter(name)"
    else:  # peft leaves a configuration on the wrapped transformers model too
        around = [module for module in model.modules() if not isinstance(module, PreTrainedModel)]
        adapted, way = [module for module in around if hasattr(module, "peft_config")], "to model.get_base_model()"
    if adapted:
        advice = f"attach before they are added, with modules_to_save=['{ATTACHED}'], or, to save nothing, {way}"
        raise ValueError(f"{type(adapted[0]).__name__} has adapters, which are saved without the encoding; {advice}")
