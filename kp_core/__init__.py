"""Knowledge compiled once into KV caches, delivered to open-weight models by a short handle in place of text.

Importing this package loads no library; the first use of a name imports it.
"""

# ruff: noqa: I001 - it would put each name of the list for type checkers into an import of its own

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The same names as in `_PLACES`, for type checkers and editors.
    from kp_core.banks import (
        ChromaFactStore as ChromaFactStore,
        Fact as Fact,
        FactStore as FactStore,
        Hit as Hit,
        MemoryFactStore as MemoryFactStore,
    )
    from kp_core.banks.embed import Embedder as Embedder, SentenceTransformerEmbedder as SentenceTransformerEmbedder
    from kp_core.bundled import bundled_embedder as bundled_embedder
    from kp_core.engines.hf.loading import bundled_model as bundled_model
    from kp_core.engines.local.tree import PrefixTree as PrefixTree
    from kp_core.engines.shared import load_engine as load_engine
    from kp_core.errors import KnowledgePackError as KnowledgePackError
    from kp_core.kv import KVTensors as KVTensors
    from kp_core.packs.fingerprint import ModelFingerprint as ModelFingerprint
    from kp_core.packs.handle import Handle as Handle, find_handles as find_handles, strip_handles as strip_handles
    from kp_core.packs.pack import KnowledgePack as KnowledgePack, Prefix as Prefix
    from kp_core.packs.store import PackStore as PackStore
    from kp_core.packs.view import Packs as Packs, PackView as PackView
    from kp_core.plan.composer import Composer as Composer, ExactComposer as ExactComposer
    from kp_core.plan.engine import Engine as Engine, TokenStream as TokenStream
    from kp_core.plan.plan import Plan as Plan, Region as Region, Sampling as Sampling
    from kp_core.plan.request import Request as Request
    from kp_core.prompt.conversation import Message as Message
    from kp_core.prompt.prompt import Prompt as Prompt, Span as Span
    from kp_core.prompt.template import ChatTemplate as ChatTemplate
    from kp_core.session.deciding import Decision as Decision, Decisions as Decisions, Question as Question
    from kp_core.session.reading import Generation as Generation, Usage as Usage
    from kp_core.session.session import Session as Session
    from kp_core.session.stream import AsyncStream as AsyncStream, Stream as Stream
    from kp_core.steering import Steering as Steering
    from kp_core.tools import (
        Delta as Delta,
        TokenLogprob as TokenLogprob,
        Tool as Tool,
        ToolCall as ToolCall,
        ToolCallDelta as ToolCallDelta,
    )

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
    "plan.plan": "Plan Region Sampling",
    "prompt.prompt": "Prompt Span",
    "prompt.conversation": "Message",
    "prompt.template": "ChatTemplate",
    "steering": "Steering",
    "tools": "Delta TokenLogprob Tool ToolCall ToolCallDelta",
}
_METHODS = re.compile(r"\w+Composer|Calibration\w*|calibrate_composers|edit|compose")
"""What is in `kp_methods` from 0.3 on."""
_MODULES = {name: f"{__name__}.{module}" for module, names in _PLACES.items() for name in names.split()}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - type checkers take the imports above, which say `as`


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
