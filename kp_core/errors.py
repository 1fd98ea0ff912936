"""Every exception this package raises on purpose.

    KnowledgePackError
    ├── PromptError       ShortTextError, ContextOverflowError
    ├── ModelError        MissingDependencyError
    ├── PackError         PackNotFoundError, PackCorruptError
    ├── FactError         FactStoreLockedError
    └── OptionError, UnsupportedRequestError, GenerationTimeoutError

Each message says what was got, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

__all__ = [
    "ContextOverflowError",
    "FactError",
    "FactStoreLockedError",
    "GenerationTimeoutError",
    "KnowledgePackError",
    "MissingDependencyError",
    "ModelError",
    "OptionError",
    "PackCorruptError",
    "PackError",
    "PackNotFoundError",
    "PromptError",
    "ShortTextError",
    "UnsupportedRequestError",
]

_GONE: Mapping[str, str] = {
    "absorb": "packs stand in place of results; placement='system' puts them into the system message",
    "compact": "packs stand in place of results; placement='system' puts them into the system message",
    "co_compile": "`keep='always'` keeps what a request computes behind other packs",
    "compress='int8'": "'lossless' stores KV in fewer bytes, kv='lazy' stores text alone",
    "composer='naive'": "'splice' moves packs to their positions",
    "keep_bytes": "`max_bytes` bounds all KV of a store; a request with keep='never' keeps nothing",
    "deterministic": "an engine computes in one way, bit for bit where it supports 'bitwise'",
    "from_collection": "an adapter delivers what your own retriever finds (docs/vector-stores.md)",
    "order": "packs stand as they are given: give them in the order of an earlier request",
    "pin": "the KV that was used last stays in memory, as much as cache_bytes allows",
    "max_handles": "`memory_tokens` bounds the packs of a memory",
    "rerank": "LangChain and LlamaIndex have rerankers; put packs to their texts behind them",
    "recognise": "a text is a text: send the handle of its pack (content='handle' of a retriever, or to_handles)",
    "mismatch='accept'": "'rebuild' computes packs of other numerics anew from their text",
    "upgrade": "a request with composer='exact' computes the exact KV and keeps it",
    "vacuum": "`chroma vacuum --path FOLDER` is Chroma's own command (SECURITY.md)",
}
"""Options, and values of options, of earlier releases; and what to use instead."""


class KnowledgePackError(Exception):
    """Base of every error this package raises on purpose."""


class PromptError(KnowledgePackError, ValueError):
    """What cannot become a prompt: a conversation, a text, a tool, a schema, a name of a handle or namespace."""


class ShortTextError(PromptError):
    """A text without a token that stays the same whatever surrounds it, so it cannot be a pack at its position."""


class ContextOverflowError(PromptError):
    """Prompt and answer need more positions than the model has; raised before any compute.

    Attributes: `prompt_tokens` (pack tokens included), the requested `max_tokens`, and `limit`, the model's positions.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit
        super().__init__(
            f"The prompt has {prompt_tokens} tokens and the answer may take {max_tokens}: "
            f"{prompt_tokens + max_tokens} in all, but the model has {limit} positions. "
            f"Drop at least {prompt_tokens + max_tokens - limit} tokens of messages or packs, or lower max_tokens."
        )


class ModelError(KnowledgePackError):
    """A model that cannot be loaded or served, was changed meanwhile, has too little memory, or takes no more work."""


class MissingDependencyError(ModelError, ImportError):
    """An optional package is missing; the message contains the command that installs it."""


class PackError(KnowledgePackError):
    """A pack, its file or its KV that cannot be used as asked, or was made by another model; a store without room."""


class PackNotFoundError(PackError, LookupError):
    """No pack under this handle."""


class PackCorruptError(PackError):
    """A damaged file: of an entry, which is computed again from its text, or of a text."""


class FactError(KnowledgePackError, ValueError):
    """An invalid fact, source, search, filter or task, or a fact store that is empty, not ours or fails."""


class FactStoreLockedError(FactError):
    """Another process has the fact store open for writing."""


class OptionError(KnowledgePackError, TypeError, ValueError):
    """An option that does not exist, or has a value, a steering or a wrapper that cannot be used."""


class UnsupportedRequestError(KnowledgePackError):
    """An engine does not support the request; the message says which one does."""


class GenerationTimeoutError(KnowledgePackError, TimeoutError):
    """An answer took longer than `timeout` seconds; its memory was released."""


_FOLDED = {
    **dict.fromkeys(("HandleError", "TemplateError", "ToolError"), "PromptError"),
    **dict.fromkeys(("BusyError", "CacheBudgetError", "ModelChangedError", "UnsupportedModelError"), "ModelError"),
    **dict.fromkeys(("FingerprintMismatchError", "QuotaError"), "PackError"),
    **dict.fromkeys(("SamplingError", "SteeringError", "WrapperError"), "OptionError"),
    "SourceError": "FactError",
}
"""Errors of earlier releases, and the one that is raised instead."""


def __getattr__(name: str) -> NoReturn:
    no_attribute(__name__, name, f"catch {_FOLDED[name]}" if name in _FOLDED else "")


def no_attribute(module: str, name: str, instead: str = "") -> NoReturn:
    """Refuse a name that a module lacks; `instead` says what to use for one of an earlier release."""
    if instead:
        raise ImportError(f"`{module}.{name}` is gone in 0.3; {instead}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def gone(name: str, value: object = None) -> str:
    """Return the sentence, after a space, on an option or value of an earlier release; empty for any other.

    Without `value`, it is the option itself that is unknown.
    """
    instead = _GONE.get(name if value is None else f"{name}={value!r}")
    return f" It is gone in 0.3; {instead}." if instead else ""
