"""Parsers of plain text, loaded on first use: spaCy and stanza, neither of which this library depends on."""

from __future__ import annotations

import importlib
import types
from collections.abc import Sequence
from typing import Any

from pelocality.corpora.constituents import parse_bracketed
from pelocality.corpora.sentence import Constituents, Dependencies, Sentence


def _import(package: str) -> types.ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"parsing plain text with {package} needs it: pip install {package}") from error


class _LazyParser:
    """Load a pipeline on the first text, and leave it out of pickles: each process loads its own."""

    _pipeline: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pipeline"}


class SpacyParser(_LazyParser):
    """Dependencies of plain text by a spaCy pipeline.

    English pipelines write relations in the CLEAR scheme (``dobj``, ``nsubjpass``), which the rules of
    ``semantic_role_swap`` read beside Universal Dependencies.

    Args:
        model: Name of an installed pipeline, such as ``en_core_web_sm``.

    Calling it with a sequence of texts gives a list of sentences, one per text.

    Raises:
        ImportError: On the first text, where spaCy or the pipeline is not installed.
    """

    def __init__(self, model: str = "en_core_web_sm") -> None:
        self.model = model

    def __call__(self, texts: Sequence[str]) -> list[Sentence]:
        """Parse texts.

        Args:
            texts: The texts; each is one sentence of the result, whatever spaCy thinks.

        Returns:
            One sentence per text.
        """
        if self._pipeline is None:
            spacy = _import("spacy")
            try:
                self._pipeline = spacy.load(self.model)
            except OSError as error:
                raise ImportError(f"model {self.model!r} is not an installed spaCy pipeline: {error}") from error
        return [self._sentence(doc) for doc in self._pipeline.pipe(texts)]

    def _sentence(self, doc: Any) -> Sentence:
        # spaCy makes tokens of runs of spaces; they are spacing, not words
        tokens = [token for token in doc if not token.is_space]
        place = {token.i: k for k, token in enumerate(tokens, 1)}
        spaces = []
        for k, token in enumerate(tokens):
            following = tokens[k + 1].idx if k + 1 < len(tokens) else token.idx + len(token)
            spaces.append(doc.text[token.idx + len(token) : following])
        return Sentence(
            tuple(token.text for token in tokens),
            tuple(spaces),
            language=doc.lang_,
            dependencies=Dependencies(
                tuple(0 if token.head.i == token.i else place.get(token.head.i, 0) for token in tokens),
                tuple("root" if token.dep_ == "ROOT" else token.dep_ for token in tokens),
                f"spaCy {self.model}",
                tuple(token.pos_ for token in tokens),
                tuple(token.morph.to_dict() for token in tokens),
                automatic=True,
            ),
            source="plain text",
        )


class StanzaParser(_LazyParser):
    """Universal Dependencies, and constituents where its models have them, of plain text by stanza.

    Args:
        language: ISO code of a language whose models are installed.
        processors: Which of stanza's processors to run; ``constituency`` exists for few languages. None takes
            constituents for English and goes without elsewhere.

    Calling it with a sequence of texts gives a list of sentences, one per text.

    Raises:
        ImportError: On the first text, where stanza is not installed.
    """

    def __init__(self, language: str = "en", processors: str | None = None) -> None:
        self.language = language
        default = "tokenize,mwt,pos,lemma,depparse" + (",constituency" if language == "en" else "")
        self.processors = processors or default

    def __call__(self, texts: Sequence[str]) -> list[Sentence]:
        """Parse texts.

        Args:
            texts: The texts; each is taken as one sentence.

        Returns:
            One sentence per text.
        """
        if self._pipeline is None:
            stanza = _import("stanza")
            self._pipeline = stanza.Pipeline(
                self.language,
                processors=self.processors,
                tokenize_no_ssplit=True,
                download_method=None,
                verbose=False,
            )
        # a text is parsed by itself: stanza without sentence splitting cuts a joint text at blank lines only
        return [self._sentence(self._pipeline(" ".join(text.split()))) for text in texts]

    def _sentence(self, doc: Any) -> Sentence:
        words: list[str] = []
        spaces: list[str] = []
        contractions: list[tuple[int, int, str]] = []
        heads: list[int] = []
        relations: list[str] = []
        upos: list[str] = []
        features: list[dict[str, str]] = []
        bracketed: list[str] = []
        for sentence in doc.sentences:
            offset = len(words)
            for token in sentence.tokens:
                if len(token.words) > 1:
                    contractions.append((len(words), len(words) + len(token.words), token.text))
                for word in token.words:
                    words.append(word.text)
                    spaces.append("")
                    heads.append(word.head + offset if word.head else 0)
                    relations.append(word.deprel)
                    upos.append(word.upos)
                    pairs = (part.split("=", 1) for part in (word.feats or "").split("|") if part)
                    features.append(dict(pairs))
                spaces[-1] = token.spaces_after
            if getattr(sentence, "constituency", None) is not None:
                bracketed.append(str(sentence.constituency))
        if spaces:
            spaces[-1] = ""
        source = f"stanza {self.language}"
        return Sentence(
            tuple(words),
            tuple(spaces),
            language=self.language,
            contractions=tuple(contractions),
            constituents=_joint_constituents(bracketed, len(words), source),
            dependencies=Dependencies(
                tuple(heads), tuple(relations), source, tuple(upos), tuple(features), automatic=True
            ),
            source="plain text",
        )


def _joint_constituents(bracketed: list[str], count: int, source: str) -> Constituents | None:
    """Put the trees of one text under one root; None where they do not cover its words."""
    if not bracketed:
        return None
    words, constituents = parse_bracketed(f"(ROOT {' '.join(bracketed)})", source, automatic=True)
    return constituents if len(words) == count else None
