"""Knowledge Packs for LangChain: a chat model that resolves handles, and a retriever that returns them.

It imports only LangChain's core and this project's; models and facts load on first use. `KnowledgePackMiddleware`, for
agents, is in `kp_langchain.middleware`, which imports `langchain`.
"""

from __future__ import annotations

from typing import NoReturn

from kp_core.bundled import needing
from kp_core.errors import no_attribute

with needing("kp_langchain needs LangChain", "langchain"):
    from kp_langchain.chat_model import ChatKnowledgePacks
    from kp_langchain.messages import pack_place, to_messages
    from kp_langchain.retriever import KnowledgePackRetriever, create_pack_search_tool, resolve_documents, to_handles

__all__ = [
    "ChatKnowledgePacks",
    "KnowledgePackRetriever",
    "create_pack_search_tool",
    "pack_place",
    "resolve_documents",
    "to_handles",
    "to_messages",
]

_GONE = {"KnowledgePackEmbeddings": "docs/vector-stores.md has the bundled embedder as LangChain's `Embeddings`"}


def __getattr__(name: str) -> NoReturn:
    no_attribute(__name__, name, _GONE.get(name, ""))
