"""Every exception this package raises on purpose.

    KnowledgePackError
    ├── PromptError       TemplateError (ShortTextError), HandleError, ToolError, ContextOverflowError
    ├── ModelError        UnsupportedModelError, ModelChangedError, MissingDependencyError
    ├── PackError         FingerprintMismatchError, PackNotFoundError, PackCorruptError, QuotaError
    ├── FactError         FactStoreLockedError, SourceError
    └── OptionError, UnsupportedRequestError, SamplingError, SteeringError, WrapperError, CacheBudgetError, BusyError,
        GenerationTimeoutError

Each message says what was got, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BusyError",
    "CacheBudgetError",
    "ContextOverflowError",
    "FactError",
    "FactStoreLockedError",
    "FingerprintMismatchError",
    "GenerationTimeoutError",
    "HandleError",
    "KnowledgePackError",
    "MissingDependencyError",
    "ModelChangedError",
    "ModelError",
    "OptionError",
    "PackCorruptError",
    "PackError",
    "PackNotFoundError",
    "PromptError",
    "QuotaError",
    "SamplingError",
    "ShortTextError",
    "SourceError",
    "SteeringError",
    "TemplateError",
    "ToolError",
    "UnsupportedModelError",
    "UnsupportedRequestError",
    "WrapperError",
]

_GONE: Mapping[str, str] = {
    "co_compile": "`keep='always'` keeps what a request computes behind other packs",
    "compress='int8'": "'lossless' stores KV in fewer bytes, kv='lazy' stores text alone",
    "composer='naive'": "'splice' moves packs to their positions",
    "keep_bytes": "`max_bytes` bounds all KV of a store; a request with keep='never' keeps nothing",
    "deterministic": "an engine computes in one way, bit for bit where it supports 'bitwise'",
    "from_collection": "an adapter delivers what your own retriever finds (docs/vector-stores.md)",
    "order": "packs stand as they are given: give them in the order of an earlier request",
    "mismatch='accept'": "'rebuild' computes packs of other numerics anew from their text",
    "upgrade": "a request with composer='exact' computes the exact KV and keeps it",
    "vacuum": "`chroma vacuum --path FOLDER` is Chroma's own command (docs/security.md)",
}
"""Options, and values of options, of earlier releases; and what to use instead."""


class KnowledgePackError(Exception):
    """Base of every error this package raises on purpose."""


class PromptError(KnowledgePackError, ValueError):
    """The conversation cannot become a prompt."""


class TemplateError(PromptError):
    """The chat template refused the conversation, or lacks what was asked for."""


class ShortTextError(TemplateError):
    """A text without a token that stays the same whatever surrounds it, so it cannot be a pack at its position."""


class HandleError(PromptError):
    """A string that is not a handle, or a name that is not a namespace."""


class ToolError(PromptError):
    """A tool, a tool choice or a JSON Schema that cannot be honoured."""


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
    """A model that cannot be loaded or served."""


class UnsupportedModelError(ModelError):
    """The architecture does not cache keys and values, or latents, of every token."""


class ModelChangedError(ModelError):
    """Weights, modules or adapters of a model changed while an engine runs it."""


class MissingDependencyError(ModelError, ImportError):
    """An optional package is missing; the message contains the command that installs it."""


class PackError(KnowledgePackError):
    """A pack, its file or its KV that cannot be used as asked."""


class FingerprintMismatchError(PackError):
    """A pack, steering or wrapper that another model made, or the same model in other numerics.

    Attributes: `differences`, mapping each differing field to `(of the pack, of the model)`; `same_model`, whether only
    numerics differ. For objects other than packs, `kind` is their name and `advice` says what to do.
    """

    def __init__(
        self,
        what: str,
        differences: Mapping[str, tuple[str, str]],
        kind: str = "pack",
        advice: str | None = None,
        *,
        same_model: bool = False,
    ) -> None:
        self.differences, self.same_model = dict(differences), same_model
        lines = "; ".join(
            f"{name}: {kind} has {stored}, model has {model}" for name, (stored, model) in differences.items()
        )
        cause = "was made by this model with other numerics" if same_model else "was not made by this model"
        advice = advice or (
            "Its KV is not used. To go on, have it computed anew from its text with "
            '`mismatch="rebuild"`, or build the pack again with `engine.build_pack(pack.text, ...)`.'
        )
        super().__init__(f"{what} {cause} ({lines}). {advice}")


class PackNotFoundError(PackError, LookupError):
    """No pack under this handle."""


class PackCorruptError(PackError):
    """A damaged file: of an entry, which is computed again from its text, or of a text."""


class QuotaError(PackError):
    """The store has no room for this pack, even after dropping all KV that may be dropped."""


class FactError(KnowledgePackError, ValueError):
    """An invalid fact, search, filter or task, or a fact store that is empty, not ours or fails."""


class FactStoreLockedError(FactError):
    """Another process has the fact store open for writing."""


class SourceError(FactError):
    """A file of facts, or a row of one, that cannot be read; the message names file and line."""


class OptionError(KnowledgePackError, TypeError):
    """An option that does not exist."""


class UnsupportedRequestError(KnowledgePackError):
    """An engine does not support the request; the message says which one does."""


class SamplingError(KnowledgePackError, ValueError):
    """A generation option out of range."""


class SteeringError(KnowledgePackError, ValueError):
    """Contrastive pairs without a difference, a steering that fits nowhere in a prompt, or a strength out of range."""


class WrapperError(KnowledgePackError, ValueError):
    """Soft tokens around packs, their training or their file, that cannot be used."""


class BusyError(KnowledgePackError):
    """The engine's queue of background work is full."""


class CacheBudgetError(KnowledgePackError, MemoryError):
    """The KV of prompt and answer exceeds `cache_bytes`, the memory for KV, or the device ran out of memory."""


class GenerationTimeoutError(KnowledgePackError, TimeoutError):
    """An answer took longer than `timeout` seconds; its memory was released."""


def gone(name: str, value: object = None) -> str:
    """Return the sentence, after a space, on an option or value of an earlier release; empty for any other.

    Without `value`, it is the option itself that is unknown.
    """
    instead = _GONE.get(name if value is None else f"{name}={value!r}")
    return f" It is gone in 0.3; {instead}." if instead else ""
