"""Knowledge compiled once into KV caches, delivered to open-weight models by a short handle in place of text.

Importing this package loads neither transformers nor any framework; `load_engine` does, when it is called.
"""

from __future__ import annotations

from pathlib import Path

from kp_core.bundled import bundled_embedder
from kp_core.compose import BlendComposer, Composer, ExactComposer, NaiveComposer, PacketComposer, SpliceComposer
from kp_core.engines.base import Engine, TokenStream
from kp_core.engines.comparing import Calibration, Comparison, calibrate_composer, compare_composers
from kp_core.engines.local.tree import PrefixTree
from kp_core.engines.request import Generation, Request
from kp_core.engines.session import Session
from kp_core.engines.shared import load_engine
from kp_core.engines.streams import AsyncStream, Stream
from kp_core.errors import KnowledgePackError
from kp_core.facts import ChromaFactStore, Fact, FactStore, Hit, MemoryFactStore
from kp_core.facts.embed import Embedder, SentenceTransformerEmbedder
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles, strip_handles
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore
from kp_core.packs.view import Packs, PackSource, PackView
from kp_core.plan import Plan, Region, Sampling
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.resolve import Message
from kp_core.prompt.template import ChatTemplate
from kp_core.renamed import keep_modules, old_names
from kp_core.steering import Steering
from kp_core.tools import Delta, Tool, ToolCall, ToolCallDelta
from kp_core.usage import Usage

__all__ = [
    "AsyncStream",
    "BlendComposer",
    "Calibration",
    "ChatTemplate",
    "ChromaFactStore",
    "Comparison",
    "Composer",
    "Delta",
    "Embedder",
    "Engine",
    "ExactComposer",
    "Fact",
    "FactStore",
    "Generation",
    "Handle",
    "Hit",
    "KVTensors",
    "KnowledgePack",
    "KnowledgePackError",
    "MemoryFactStore",
    "Message",
    "ModelFingerprint",
    "NaiveComposer",
    "PackSource",
    "PackStore",
    "PackView",
    "PacketComposer",
    "Packs",
    "Plan",
    "Prefix",
    "PrefixTree",
    "Prompt",
    "Region",
    "Request",
    "Sampling",
    "SentenceTransformerEmbedder",
    "Session",
    "Span",
    "SpliceComposer",
    "Steering",
    "Stream",
    "TokenStream",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "bundled_embedder",
    "bundled_model",
    "calibrate_composer",
    "compare_composers",
    "find_handles",
    "load_engine",
    "strip_handles",
]


def bundled_model() -> Path:
    """Folder of the bundled SmolLM2-135M-Instruct; see `kp_core.engines.hf.bundled`."""
    from kp_core.engines.hf.bundled import bundled_model

    return bundled_model()


__getattr__ = old_names(
    __name__, Head=Prefix, ChromaFactBank=ChromaFactStore, FactBank=FactStore, MemoryFactBank=MemoryFactStore
)
_FOLDERS = {"packs": ("fingerprint", "handle", "pack", "store"), "prompt": ("resolve", "template")}
keep_modules(
    {
        "kp_core.bankpacks": "kp_core.delivery",
        "kp_core.embed": "kp_core.facts.embed",
        "kp_core.packfile": "kp_core.packs.file",
        **{f"kp_core.banks{name}": f"kp_core.facts{name}" for name in ("", ".base", ".chroma", ".filters", ".rerank")},
        **{f"kp_core.sources{name}": f"kp_core.facts.sources{name}" for name in ("", ".drafts")},
        **{f"kp_core.{name}": f"kp_core.{folder}.{name}" for folder, names in _FOLDERS.items() for name in names},
    }
)
