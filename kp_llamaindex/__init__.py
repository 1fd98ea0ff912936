"""Knowledge Packs for LlamaIndex: an LLM that resolves handles, and nodes, retrievers and memory that return them.

It imports only LlamaIndex's core and this project's; models and facts load on first use.
"""

from __future__ import annotations

from kp_core.bundled import needing

with needing("kp_llamaindex needs LlamaIndex", "llamaindex"):
    from kp_llamaindex.embedding import KnowledgePackEmbedding
    from kp_llamaindex.events import PackEvent
    from kp_llamaindex.index import KnowledgePackIndex, KnowledgePackVectorStore
    from kp_llamaindex.llm import KnowledgePackLLM
    from kp_llamaindex.memory import KnowledgePackMemoryBlock
    from kp_llamaindex.messages import pack_place, to_messages
    from kp_llamaindex.nodes import NumberSources, PackNode
    from kp_llamaindex.retriever import KnowledgePackPostprocessor, KnowledgePackRetriever

__all__ = [
    "KnowledgePackEmbedding",
    "KnowledgePackIndex",
    "KnowledgePackLLM",
    "KnowledgePackMemoryBlock",
    "KnowledgePackPostprocessor",
    "KnowledgePackRetriever",
    "KnowledgePackVectorStore",
    "NumberSources",
    "PackEvent",
    "PackNode",
    "pack_place",
    "to_messages",
]
