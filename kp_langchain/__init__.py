"""Knowledge Packs for LangChain: a chat model that resolves handles, and a retriever that returns them.

Imports LangChain's core and this project's, nothing else: models and banks load when they are first used.
"""

from __future__ import annotations

from kp_langchain.chat_model import ChatKnowledgePacks, shared_engine
from kp_langchain.messages import pack_place, to_messages
from kp_langchain.retriever import KnowledgePackRetriever

__all__ = ["ChatKnowledgePacks", "KnowledgePackRetriever", "pack_place", "shared_engine", "to_messages"]
