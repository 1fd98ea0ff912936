"""`KnowledgePackEmbedding`: the embedder of this project, by default the bundled one, as LlamaIndex's embedding."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import Field

from kp_core.banks.embed import SentenceTransformerEmbedder
from kp_core.errors import FactError

__all__ = ["KnowledgePackEmbedding"]


class KnowledgePackEmbedding(BaseEmbedding):
    """Vectors of length 1, of all-MiniLM-L6-v2 (384 numbers, no hub needed) or of another `embedder`.

    They are those of `ChromaFactStore(path)`, so a collection of either can be searched with the other. Raises
    `MissingDependencyError` on first use without the extra `embed`, and `FactError` for a `model_name` that is not the
    embedder's: in serialised form, an `embedder` of another model is left out, and must be given again.
    """

    embedder: Any = Field(default=None, exclude=True, description="A `kp_core.Embedder`; by default the bundled one.")

    def __init__(self, embedder: Any = None, **settings: Any) -> None:
        embedder = embedder or SentenceTransformerEmbedder()
        if (name := settings.get("model_name", embedder.name)) != embedder.name:
            hint = f"Give the embedder of that model: `embedder=SentenceTransformerEmbedder({name!r})`."
            raise FactError(f"Got the embedder {embedder.name!r} and model_name={name!r}. {hint}")
        super().__init__(**{"model_name": embedder.name, **settings, "embedder": embedder})

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "KnowledgePackEmbedding"

    def _get_query_embedding(self, query: str) -> Embedding:
        vector: Embedding = self.embedder.embed_query(query).tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        vectors: list[Embedding] = self.embedder.embed(texts).tolist()
        return vectors

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
