"""Identical-word probing: the attention of one repeated word shows positions alone, as its content is constant."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from pelocality._checks import count, flag
from pelocality._distributed import failing_together, rank_and_size, undivided_if_sharded
from pelocality.models.inputs.words import constant_content, repeated_words
from pelocality.models.layers import AttentionLayers, texts_of
from pelocality.models.measuring.provenance import provenance
from pelocality.models.measuring.result import PositionalAttention
from pelocality.models.measuring.rows import RowSums
from pelocality.models.measuring.samples import CAUSAL
from pelocality.models.measuring.words import WordSums
from pelocality.models.sequence_model import SequenceModel

# Attention of one batch in one layer; a batch of one word may need more.
_BATCH_BYTES, _BATCH_BYTES_OF_GPU = 2**24, 2**28


@undivided_if_sharded
def positional_attention(
    model: nn.Module | SequenceModel,
    tokenizer: Any = None,
    length: int = 64,
    *,
    words: int | Sequence[str | int] = 64,
    seed: int = 0,
    special_tokens: bool = False,
    prefix: bool | str | int = False,
    layers: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    matrices: bool = True,
) -> PositionalAttention:
    r"""Return the attention of a model to one repeated word, averaged over words.

    $$A_{ij} = \frac{1}{|W|} \sum_{w \in W} \operatorname{attention}(w, w, \dots, w)_{ij}$$

    Content is constant, so the weights show position alone (Wang et al., ICLR 2021, there for the first layer and 300
    random words). In deeper layers it is still the position of constant content, passed through the layers below. A
    model with relative positions only has equal hidden states at all positions of every layer, so each layer shows only
    the relative positions that it adds itself; the ``notes`` of the result then state it.

    Attention is observed where torch computes it, in the implementation that the model uses: any model that attends by
    torch's kernel, by ``nn.MultiheadAttention`` or by a softmax that multiplies the values can be probed. The mode and
    the weights of the model are restored, also after an interrupt.

    Where ``torch.distributed`` is initialised, each process measures a part of the words, and all return the result.

    Args:
        model: A transformers model, with or without a head, or a `SequenceModel` of any module. Of an encoder-decoder
            model the encoder is probed; pass ``model.get_decoder()`` for the other half.
        tokenizer: Its tokenizer. Words are then whole words of letters; without one they are any ids but those the
            configuration calls special.
        length: Number of positions n, in tokens. Tokens that the model itself puts around its input, such as a ViT's
            [CLS], are cut out of the matrices, rows renormalised.
        words: How many words to draw, each word of the vocabulary as likely as any other, or the words themselves
            (text of one token each, or ids). 16 words instead of 256 move single heads of a small BERT by up to 0.04
            in locality. For a model that reads something else than token ids, how many samples to ask its ``inputs``
            for; their numbers begin at ``seed``.
        seed: Seed of the draw.
        special_tokens: Feed the tokenizer's special tokens around the words and cut them out of the matrices, rows
            renormalised. By default none are fed. The numbers differ: [CLS] and [SEP] draw attention, and the attention
            between the words is more local.
        prefix: True to feed the beginning-of-text token of the tokenizer or the configuration before the words, or
            another word or id, and cut it out of the matrices, rows renormalised; ``cut_share`` is what it received.
            Where positions are only relative, as in most decoders, it makes the hidden states differ: without it each
            layer shows only the positions that it adds itself.
        layers: Layers to return, by their index in the model; by default all that have attention. Long inputs to
            large models take much memory: ask for a few layers at a time.
        batch_size: Words at a time; by default at most 64, as many as fit into 16 MiB of attention weights of a
            layer (256 MiB on a GPU). Memory does not grow with the number of words.
        progress: Show a progress bar on runs that take longer than a few seconds.
        matrices: False for long inputs: measure blocks of rows alone, in memory that grows with n and not n squared.

    Returns:
        A `PositionalAttention` with the mean matrix (layer, head, n, n) with rows that sum to 1, the metrics of each
        word, and their provenance. Learned sinks are set apart, their share is in ``per_sample``. On the model's
        device, float32 (float64 for a float64 model). With ``matrices=False`` an `AveragedMetrics`: the same metrics of
        each word, and the mean attention by distance.

    Raises:
        TypeError: Something that is not a model, or arguments of the wrong type.
        ValueError: A model that cannot be probed (the message says why), a length beyond its positions, words
            that are not one token, or unknown layers; with ``matrices=False`` a model without token ids, or positions
            that are no line.
        RuntimeError: Another process failed.

    Examples:
        >>> import torch
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> _ = torch.manual_seed(0)
        >>> tiny = DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=16, vocab_size=99)
        >>> result = positional_attention(DistilBertModel(tiny), length=12, words=8)
        >>> result.attention.shape, result.mean_of_metric.locality.shape
        (torch.Size([2, 2, 12, 12]), torch.Size([2, 2]))
        >>> result.to_frame().columns[:4].tolist()
        ['layer', 'head', 'locality', 'locality_low']
    """
    model = SequenceModel.of(model)
    flag("special_tokens", special_tokens)
    flag("matrices", matrices)
    count("batch_size", 1 if batch_size is None else batch_size)
    if model.content is not None:
        probe = constant_content(model, length, words, seed, special_tokens or prefix is not False)
    else:
        probe = repeated_words(model, tokenizer, length, words, seed, special_tokens, prefix)
    places = model.positions_of(length)
    rank, processes = rank_and_size()
    with failing_together() as must_agree:
        must_agree += (probe.ids, probe.names, length, layers)
        attending = AttentionLayers(model, probe.inputs(0, 1), length + probe.fed, layers)
        requested = attending.requested
        positions = slice(attending.before + probe.before, attending.before + probe.before + length)
        of_one_word = attending.heads * (attending.added + probe.fed + length) ** 2 * attending.dtype.itemsize
        at_most = (_BATCH_BYTES if model.device.type == "cpu" else _BATCH_BYTES_OF_GPU) // of_one_word
        share = math.ceil(len(probe.names) / processes)
        size = batch_size or math.ceil(share / math.ceil(share / max(1, min(64, at_most))))  # batches of about one size
        size = min(size, share) if model.content is None else 1
        starts = range(0, len(probe.names), size)[rank::processes]
        sums: Any = (
            WordSums(model, attending, requested, length) if matrices else RowSums(model, attending, requested, 1)
        )
        if not matrices:
            sums.check_line(length)
        for start in tqdm(starts, desc="identical words", unit="batch", delay=3, disable=not progress):
            inputs = probe.inputs(start, size)
            rows = texts_of(inputs) if model.content is None else 1
            included = torch.zeros(rows, positions.stop, dtype=torch.bool, device="cpu")
            included[:, positions] = True
            sums.add(start, inputs, included)
        equal_states = model.equal_states(probe.inputs(0, 1), positions)
    drawn = {"seed": count("seed", seed, 0)} if isinstance(words, int | np.integer) else {}
    fed = {"words": probe.names, "word_ids": probe.ids, "prefix": probe.prefix, "special_tokens": special_tokens}
    sums.add_processes()
    without = () if attending.added + probe.fed else ("cut_share",)
    if not matrices:
        return sums.result(*without, equal_states=equal_states, **fed, **drawn)
    mean = sums.attention.div_(len(probe.names))  # in place: this tensor is most of the memory for long inputs
    visible = None if bool(sums.visible.all()) else sums.visible
    source = provenance(model, attending, causal=sums.causal, equal_states=equal_states, **fed, **drawn)
    per_word = sums.per_sample(*without, *(() if sums.causal else CAUSAL))
    per_word = {name: values.to(mean) for name, values in per_word.items()}
    return PositionalAttention(mean, per_word, requested, source, visible, attending.others, places)
