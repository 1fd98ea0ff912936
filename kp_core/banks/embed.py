"""Embedders: text to vectors."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kp_core.bundled import bundled_embedder, needing
from kp_core.errors import FactError
from kp_core.pickling import Shared
from kp_core.threads import make_anew

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_UNIT_TOLERANCE = 1e-3
_MANY = 500
_BUNDLED_NAME = "all-MiniLM-L6-v2"
_ENGLISH_BGE = ("bge-small-en", "bge-base-en", "bge-large-en")
# The English BGE models were trained with this before a question, but their files do not say so.
_BGE_QUERY_PROMPT = "Represent this sentence for searching relevant passages: "
_LAYERS, _HEADS, _EPSILON, _MOST = 6, 12, 1e-12, 256  # Of all-MiniLM-L6-v2; it reads at most so many tokens.
_EMBEDDINGS = ("word", "position", "token_type")

Array = NDArray[np.float32]


class Embedder(Protocol):
    """Turns text into vectors of length 1, so that a dot product is a cosine."""

    @property
    def name(self) -> str:
        """Name of the model; only vectors of the same name are compared."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one normalised row per text: shape `(len(texts), dimensions)`."""

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Return the vector of a question, shape `(dimensions,)`; models may treat questions differently."""


def normalised(vectors: ArrayLike) -> NDArray[np.float32]:
    """Scale one vector or many to length 1."""
    array = np.asarray(vectors, np.float32)
    return np.asarray(array / np.maximum(np.linalg.norm(array, axis=-1, keepdims=True), 1e-12), np.float32)


def checked_vectors(vectors: ArrayLike, count: int, embedder: Embedder) -> NDArray[np.float32]:
    """Return `vectors` as float32; raises `FactError`, naming the embedder, unless they are `count` unit rows."""
    # The embedder is the user's code, and the index would accept anything.
    vectors = np.ascontiguousarray(vectors, np.float32)
    if vectors.ndim != 2 or len(vectors) != count:
        raise FactError(f"The embedder {embedder.name!r} gave the shape {vectors.shape}; expected {count} rows.")
    lengths = np.linalg.norm(vectors, axis=1)
    if not np.allclose(lengths, 1.0, atol=_UNIT_TOLERANCE):
        worst = lengths[np.argmax(np.abs(lengths - 1.0))]
        raise FactError(f"The embedder {embedder.name!r} gave a row of length {worst:.4g}; expected length 1.")
    return vectors


class SentenceTransformerEmbedder(Shared):
    """An `Embedder` over sentence-transformers; the first use loads the model.

    `model` is a name on the Hugging Face hub or a folder. `None` is all-MiniLM-L6-v2, which is installed as a package.
    Vectors are stored under `name`: by default the model's name, or the last part of the folder's path. `query_prompt`
    is put before questions; `None` is the model's own prompt, and for English BGE models the one they were trained
    with.

    Raises `MissingDependencyError`, on first use, if sentence-transformers or the bundled model is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        query_prompt: str | None = None,
    ) -> None:
        self._source = None if model is None else os.fspath(model)
        # The path differs between machines; its last part usually names the model.
        given = Path(self._source).resolve().name if self._source and Path(self._source).is_dir() else self._source
        self.name = name or given or _BUNDLED_NAME
        """See `Embedder.name`; known without loading the model."""
        self._query_prompt = query_prompt
        self._loaded: SentenceTransformer | None = None
        self.forked()
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: another thread may have held the lock."""
        self._lock = threading.Lock()

    def _opens(self) -> Callable[[], SentenceTransformerEmbedder]:
        return partial(type(self), self._source, name=self.name, query_prompt=self._query_prompt)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed`; shows a progress bar for many texts in a terminal."""
        if not texts:
            return np.empty((0, len(self.embed_query("a"))), np.float32)
        vectors = self._model().encode_document(
            list(texts),
            normalize_embeddings=True,
            show_progress_bar=len(texts) >= _MANY and sys.stderr.isatty(),
        )
        return np.asarray(vectors, np.float32)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`; uses the light numpy encoder if the bundled model is not loaded yet."""
        if self._loaded is None and self._source is self._query_prompt is None:
            return self._alone(text)
        vector = self._model().encode_query(
            text, prompt=self._query_prompt, normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(vector, np.float32)

    @cached_property
    def _alone(self) -> Callable[[str], Array]:
        return _question_encoder(bundled_embedder())

    def _model(self) -> SentenceTransformer:
        with self._lock:
            if self._loaded is None:
                with needing("Embedding text needs sentence-transformers", "embed"):
                    from sentence_transformers import SentenceTransformer
                source = str(bundled_embedder()) if self._source is None else self._source
                model = SentenceTransformer(source)
                if not model.prompts.get("query") and self.name.rpartition("/")[2].lower().startswith(_ENGLISH_BGE):
                    model.prompts["query"] = _BGE_QUERY_PROMPT
                self._loaded = model
            return self._loaded


@dataclass(eq=False)
class OtherEmbedder:
    """An `Embedder` over another library's functions for texts and for questions; scales vectors to length 1."""

    name: str
    texts: Callable[[list[str]], Any] = field(repr=False)
    question: Callable[[str], Any] = field(repr=False)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed`."""
        return normalised(self.texts(list(texts)))

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`."""
        return normalised(self.question(text))


def as_embedder(given: object) -> Embedder:
    """Return `given` as an `Embedder`: one of ours, LangChain's `Embeddings` or LlamaIndex's `BaseEmbedding`.

    Raises `FactError` for anything else.
    """
    if callable(getattr(given, "embed", None)) and callable(getattr(given, "embed_query", None)):
        return cast("Embedder", given)
    for names in (("embed_documents", "embed_query"), ("get_text_embedding_batch", "get_query_embedding")):
        texts, question = (getattr(given, name, None) for name in names)
        if callable(texts) and callable(question):
            given_names = (getattr(given, name, None) for name in ("model_name", "model", "model_id"))
            # LlamaIndex calls a model without a name "unknown".
            known = (name for name in given_names if isinstance(name, str) and name not in {"", "unknown"})
            return OtherEmbedder(next(known, type(given).__name__), texts, question)
    raise FactError(
        f"Got {type(given)} as embedder; expected an Embedder (`name`, `embed(texts)`, `embed_query(text)`), LangChain "
        "`Embeddings` or a LlamaIndex embedding, e.g. `SentenceTransformerEmbedder()`."
    )


def _question_encoder(folder: Path) -> Callable[[str], Array]:
    """Load all-MiniLM-L6-v2 for one question, in numpy: importing its libraries takes seconds, a search milliseconds.

    Returns a function from a question to its vector, shape `(384,)`, of length 1. The oracle is sentence-transformers,
    which embeds documents; the vectors agree to 1e-5.
    """
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    weights: dict[str, Array] = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_MOST)
    return lambda text: _encoded(weights, tokenizer.encode(text.strip()).ids)


def _encoded(weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """Return the vector of these tokens: a BERT encoder with mean pooling."""
    words, places, types = (weights[f"embeddings.{name}_embeddings.weight"] for name in _EMBEDDINGS)
    x = _normed(weights, words[ids] + places[: len(ids)] + types[0], "embeddings")
    for layer in range(_LAYERS):
        name = f"encoder.layer.{layer}"
        x = _normed(weights, x + _attended(weights, x, f"{name}.attention"), f"{name}.attention.output")
        inner = _gelu(_linear(weights, x, f"{name}.intermediate.dense"))
        x = _normed(weights, x + _linear(weights, inner, f"{name}.output.dense"), f"{name}.output")
    pooled: Array = x.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def _attended(weights: Mapping[str, Array], x: Array, name: str) -> Array:
    parts = (_linear(weights, x, f"{name}.self.{part}") for part in ("query", "key", "value"))
    query, key, value = (part.reshape(len(x), _HEADS, -1).transpose(1, 0, 2) for part in parts)
    scores = query @ key.transpose(0, 2, 1) / np.float32(math.sqrt(query.shape[-1]))
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = shares / shares.sum(axis=-1, keepdims=True) @ value
    return _linear(weights, mixed.transpose(1, 0, 2).reshape(x.shape), f"{name}.output.dense")


def _linear(weights: Mapping[str, Array], x: Array, name: str) -> Array:
    output: Array = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return output


def _normed(weights: Mapping[str, Array], x: Array, name: str) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(_EPSILON))
    output: Array = scaled * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]
    return output


def _gelu(x: Array) -> Array:
    """GELU, x Φ(x); the error function is Abramowitz and Stegun 7.1.26 (error 1.5e-7), because numpy has none."""
    z = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    output: Array = (x * (0.5 + 0.5 * np.sign(x) * (1 - series * np.exp(-z * z)))).astype(np.float32)
    return output
