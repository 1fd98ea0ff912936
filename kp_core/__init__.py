"""Knowledge compiled once into KV caches, delivered to open-weight models by a short handle in place of text.

Importing this package loads no library; the first use of a name imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The same names as in `_PLACES`, for type checkers and editors.
    from kp_core.banks import ChromaFactStore, Fact, FactStore, Hit, MemoryFactStore
    from kp_core.banks.embed import Embedder, SentenceTransformerEmbedder
    from kp_core.bundled import bundled_embedder
    from kp_core.engines.hf.loading import bundled_model
    from kp_core.engines.local.tree import PrefixTree
    from kp_core.engines.shared import load_engine
    from kp_core.errors import KnowledgePackError
    from kp_core.kv import KVTensors
    from kp_core.packs.fingerprint import ModelFingerprint
    from kp_core.packs.handle import Handle, find_handles, strip_handles
    from kp_core.packs.pack import KnowledgePack, Prefix
    from kp_core.packs.store import PackStore
    from kp_core.packs.view import Packs, PackView
    from kp_core.plan.composer import Composer, ExactComposer
    from kp_core.plan.engine import Engine, TokenStream
    from kp_core.plan.plan import Plan, Sampling
    from kp_core.plan.region import Region
    from kp_core.plan.request import Request
    from kp_core.prompt.conversation import Message
    from kp_core.prompt.prompt import Prompt, Span
    from kp_core.prompt.template import ChatTemplate
    from kp_core.session.deciding import Decision, Decisions, Question
    from kp_core.session.reading import Generation, Usage
    from kp_core.session.session import Session
    from kp_core.session.stream import AsyncStream, Stream
    from kp_core.steering import Steering
    from kp_core.tools import Delta, TokenLogprob, Tool, ToolCall, ToolCallDelta

__all__ = [
    "AsyncStream",
    "ChatTemplate",
    "ChromaFactStore",
    "Composer",
    "Decision",
    "Decisions",
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
    "PackStore",
    "PackView",
    "Packs",
    "Plan",
    "Prefix",
    "PrefixTree",
    "Prompt",
    "Question",
    "Region",
    "Request",
    "Sampling",
    "SentenceTransformerEmbedder",
    "Session",
    "Span",
    "Steering",
    "Stream",
    "TokenLogprob",
    "TokenStream",
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


_PLACES = {
    "bundled": "bundled_embedder",
    "plan.composer": "Composer ExactComposer",
    "plan.engine": "Engine TokenStream",
    "engines.hf.loading": "bundled_model",
    "engines.local.tree": "PrefixTree",
    "session.deciding": "Decision Decisions Question",
    "session.reading": "Generation Usage",
    "session.stream": "AsyncStream Stream",
    "plan.request": "Request",
    "session.session": "Session",
    "engines.shared": "load_engine",
    "errors": "KnowledgePackError",
    "banks": "ChromaFactStore Fact FactStore Hit MemoryFactStore",
    "banks.embed": "Embedder SentenceTransformerEmbedder",
    "kv": "KVTensors",
    "packs.fingerprint": "ModelFingerprint",
    "packs.handle": "Handle find_handles strip_handles",
    "packs.pack": "KnowledgePack Prefix",
    "packs.store": "PackStore",
    "packs.view": "Packs PackView",
    "plan.plan": "Plan Sampling",
    "plan.region": "Region",
    "prompt.prompt": "Prompt Span",
    "prompt.conversation": "Message",
    "prompt.template": "ChatTemplate",
    "steering": "Steering",
    "tools": "Delta TokenLogprob Tool ToolCall ToolCallDelta",
}
_METHODS = re.compile(r"\w+Composer|Calibration\w*|calibrate_composers|edit|compose")
"""What is in `kp_methods` from 0.3 on."""
_MODULES = {name: f"{__name__}.{module}" for module, names in _PLACES.items() for name in names.split()}


if not TYPE_CHECKING:  # Hidden from type checkers, so that they report names that do not exist.

    def __getattr__(name: str) -> object:
        """Import a name of `__all__`, or a subpackage, on first use."""
        if name in _MODULES:
            globals()[name] = found = getattr(importlib.import_module(_MODULES[name]), name)
            return found
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        from kp_core.errors import no_attribute

        instead = "composers and edits are in `kp_methods`" if _METHODS.fullmatch(name) else ""
        return no_attribute(__name__, name, instead)
