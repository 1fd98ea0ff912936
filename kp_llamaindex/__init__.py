"""Knowledge Packs for LlamaIndex: an LLM that resolves handles, and nodes, retrievers and memory that return them.

It imports only LlamaIndex's core and this project's; models and facts load on first use.
"""

from __future__ import annotations

from typing import NoReturn

from kp_core.bundled import needing
from kp_core.errors import no_attribute

with needing("kp_llamaindex needs LlamaIndex", "llamaindex"):
    from kp_llamaindex.llm import KnowledgePackLLM
    from kp_llamaindex.memory import KnowledgePackMemoryBlock
    from kp_llamaindex.messages import pack_place, to_messages
    from kp_llamaindex.retriever import KnowledgePackPostprocessor, KnowledgePackRetriever, NumberSources, PackNode
    from kp_llamaindex.selector import KnowledgePackSelector

__all__ = [
    "KnowledgePackLLM",
    "KnowledgePackMemoryBlock",
    "KnowledgePackPostprocessor",
    "KnowledgePackRetriever",
    "KnowledgePackSelector",
    "NumberSources",
    "PackNode",
    "pack_place",
    "to_messages",
]

_PACKED = "use LlamaIndex's `VectorStoreIndex` with `KnowledgePackPostprocessor`"
_GONE = dict.fromkeys(("KnowledgePackIndex", "KnowledgePackVectorStore"), _PACKED)
_GONE["PackEvent"] = "use `kp_core.events.subscribe`"
_GONE["KnowledgePackEmbedding"] = "use LlamaIndex's `HuggingFaceEmbedding(str(kp_core.bundled_embedder()))`"


def __getattr__(name: str) -> NoReturn:
    no_attribute(__name__, name, _GONE.get(name, ""))
