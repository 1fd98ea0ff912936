"""Knowledge compiled once into KV caches, delivered to open-weight models by a short handle in place of text.

Importing this package loads neither transformers nor any framework; `load_engine` does, when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kp_core.bundled import bundled_embedder
from kp_core.compose import Composer, ExactComposer, NaiveComposer
from kp_core.engines.base import Engine
from kp_core.engines.local.tree import PrefixTree
from kp_core.engines.request import Generation, Request, Sampling
from kp_core.engines.streams import AsyncStream, Stream
from kp_core.errors import KnowledgePackError
from kp_core.facts import ChromaFactBank, Fact, FactBank, Hit, MemoryFactBank
from kp_core.facts.embed import Embedder, SentenceTransformerEmbedder
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles, strip_handles
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore
from kp_core.packs.view import PackSource, PackView
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.resolve import Message
from kp_core.prompt.template import ChatTemplate
from kp_core.steering import Steering
from kp_core.tools import Delta, Tool, ToolCall, ToolCallDelta
from kp_core.usage import Usage

if TYPE_CHECKING:
    from kp_core.engines.hf import HFEngine

__all__ = [
    "AsyncStream",
    "ChatTemplate",
    "ChromaFactBank",
    "Composer",
    "Delta",
    "Embedder",
    "Engine",
    "ExactComposer",
    "Fact",
    "FactBank",
    "Generation",
    "Handle",
    "Hit",
    "KVTensors",
    "KnowledgePack",
    "KnowledgePackError",
    "MemoryFactBank",
    "Message",
    "ModelFingerprint",
    "NaiveComposer",
    "PackSource",
    "PackStore",
    "PackView",
    "Prefix",
    "PrefixTree",
    "Prompt",
    "Request",
    "Sampling",
    "SentenceTransformerEmbedder",
    "Span",
    "Steering",
    "Stream",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "bundled_embedder",
    "bundled_model",
    "find_handles",
    "load_engine",
    "strip_handles",
]


def load_engine(model: Any = None, **settings: Any) -> HFEngine:  # noqa: ANN401 - as `HFEngine` takes them
    """An engine for a Hugging Face id, a folder or a model object; see `kp_core.engines.hf.HFEngine`.

    Without `model`, the bundled SmolLM2-135M-Instruct.
    """
    from kp_core.engines.hf import HFEngine

    return HFEngine(model, **settings)


def bundled_model() -> Path:
    """Folder of the bundled SmolLM2-135M-Instruct; see `kp_core.engines.hf.bundled`."""
    from kp_core.engines.hf.bundled import bundled_model

    return bundled_model()
