"""`KnowledgePackEmbeddings`: the embedder of this project, by default the bundled one, as LangChain's `Embeddings`."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from kp_core.banks.embed import Embedder, SentenceTransformerEmbedder

__all__ = ["KnowledgePackEmbeddings"]


class KnowledgePackEmbeddings(Embeddings):
    """Vectors of length 1, of all-MiniLM-L6-v2 (384 numbers, no hub needed) or of another `embedder`.

    They are those of `path=` fact stores, so a collection of either can be searched with the other. Raises
    `MissingDependencyError` on first use without the extra `embed`.
    """

    def __init__(self, embedder: Embedder | None = None) -> None:
        self.embedder = embedder or SentenceTransformerEmbedder()

    @property
    def model_name(self) -> str:
        """Name of the model; only vectors of the same name can be compared."""
        return self.embedder.name

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text."""
        vectors: list[list[float]] = self.embedder.embed(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question; models may treat questions differently."""
        vector: list[float] = self.embedder.embed_query(text).tolist()
        return vector
