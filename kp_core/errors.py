"""Every exception this package raises on purpose.

    KnowledgePackError
    ├── PromptError                 the conversation cannot become a prompt
    │   ├── TemplateError           the chat template refused it, or lacks what was asked for
    │   │   └── ShortTextError      a text that owns no token at its position, so it can be no pack
    │   ├── UnsupportedContentError content other than text for a text model
    │   ├── HandleError             not a handle, a bad namespace
    │   ├── ToolError               a tool, a tool choice or a schema that cannot be honoured
    │   └── ContextOverflowError    more tokens than the model has positions
    ├── ModelError
    │   ├── UnsupportedModelError   what this architecture caches cannot be taken up again
    │   ├── ModelChangedError       weights or adapters changed under an engine that runs them
    │   └── MissingDependencyError  an optional package is not installed
    ├── PackError
    │   ├── KVShapeError            tensors that do not form one KV cache
    │   ├── FingerprintMismatchError a pack of another model, or of the same with other numerics
    │   ├── PackNotFoundError       no such pack in the store
    │   ├── PackCorruptError        a file that cannot be trusted, and no text to rebuild it from
    │   ├── PackVersionError        an intact file of a format version this release does not know
    │   └── QuotaError              the store is full
    ├── FactError                   a fact, a search or a task that makes no sense; a fact store that is empty or fails
    │   ├── FactStoreLockedError    a fact store that another process writes to
    │   └── SourceError             a file of knowledge that cannot be read as such
    ├── SteeringError               contrastive pairs, a steering or a strength that cannot be used
    │   └── SteeringMismatchError   a steering of another model; a FingerprintMismatchError as well
    ├── OptionError                 an option that does not exist, with the near miss
    ├── WrapperError                soft tokens, their training or their file that cannot be used
    │   └── WrapperMismatchError    soft tokens of another model; a FingerprintMismatchError as well
    ├── UnsupportedRequestError     what this engine cannot do, and which one can
    ├── SamplingError               generation options out of range
    ├── CacheBudgetError            a request whose KV is larger than all memory for KV
    ├── BusyError                   more background work than an engine keeps
    └── GenerationTimeoutError      an answer that took longer than it was given

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
    "KVShapeError",
    "KnowledgePackError",
    "MissingDependencyError",
    "ModelChangedError",
    "ModelError",
    "OptionError",
    "PackCorruptError",
    "PackError",
    "PackNotFoundError",
    "PackVersionError",
    "PromptError",
    "QuotaError",
    "SamplingError",
    "ShortTextError",
    "SourceError",
    "SteeringError",
    "SteeringMismatchError",
    "TemplateError",
    "ToolError",
    "UnsupportedContentError",
    "UnsupportedModelError",
    "UnsupportedRequestError",
    "WrapperError",
    "WrapperMismatchError",
]


class KnowledgePackError(Exception):
    """Base of every error this package raises on purpose."""


class PromptError(KnowledgePackError, ValueError):
    """The conversation cannot become a prompt."""


class TemplateError(PromptError):
    """The chat template refused the conversation, or lacks what was asked for."""


class ShortTextError(TemplateError):
    """A text of which no token stays the same whatever stands around it; it can be no pack at its position."""


class UnsupportedContentError(PromptError):
    """A message holds content other than text."""


class HandleError(PromptError):
    """A string that is not a handle, or a name that is not a namespace."""


class ToolError(PromptError):
    """A tool, a tool choice or a JSON Schema that cannot be honoured."""


class ContextOverflowError(PromptError):
    """Prompt plus answer need more positions than the model has; raised before any compute.

    Attributes: `prompt_tokens` (pack tokens included), `max_tokens` asked for, `limit` positions of the model.
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
    """The architecture keeps something other than keys and values, or latents, of every token."""


class ModelChangedError(ModelError):
    """Weights, modules or adapters of a model that were changed under an engine that runs it."""


class MissingDependencyError(ModelError, ImportError):
    """An optional package is absent; the message holds the line that installs it."""


class PackError(KnowledgePackError):
    """A pack that cannot be used as asked."""


class KVShapeError(PackError, ValueError):
    """Tensors that do not form one KV cache."""


class FingerprintMismatchError(PackError):
    """A pack that was made by something else than the model that is to read it.

    Attributes: `differences`, mapping each differing field to `(of the pack, of the model)`; `same_model`, whether they
    are of numerics alone. `kind` and `advice` are for what is no pack: its name, and what to do with it.
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
            f"{name}: {kind} has {mine}, model has {model}" for name, (mine, model) in differences.items()
        )
        made = "was made by this model with other numerics" if same_model else "was not made by this model"
        accept = 'use it as an approximation with `mismatch="accept"`, or ' if same_model else ""
        advice = advice or (
            f"Its KV is not used. To go on, {accept}have it computed anew from its text with "
            '`mismatch="rebuild"`, or build the pack again with `engine.build_pack(pack.text, ...)`.'
        )
        super().__init__(f"{what} {made} ({lines}). {advice}")


class PackNotFoundError(PackError, LookupError):
    """No pack under this handle."""


class PackCorruptError(PackError):
    """A pack file that cannot be trusted, and no intact text to rebuild it from."""


class PackVersionError(PackError):
    """An intact pack file of a format version that this release does not know."""


class QuotaError(PackError):
    """The store has no room for this pack even after dropping every KV that may be dropped."""


class FactError(KnowledgePackError, ValueError):
    """A fact, a search, a filter or a task that makes no sense, or a fact store that is empty, not ours or fails."""


class FactStoreLockedError(FactError):
    """A fact store that is open for writing elsewhere."""


class SourceError(FactError):
    """A file of knowledge, or a row of one, that cannot be read as such; the message names file and line."""


class OptionError(KnowledgePackError, TypeError):
    """An option that does not exist."""


class UnsupportedRequestError(KnowledgePackError):
    """Something that an engine does not offer; the message says what does."""


class SamplingError(KnowledgePackError, ValueError):
    """A generation option out of range."""


class SteeringError(KnowledgePackError, ValueError):
    """Contrastive pairs that say nothing, a steering that does not fit, or a strength out of range."""


class SteeringMismatchError(FingerprintMismatchError, SteeringError):
    """A steering that was made with another model than the one it is to act on."""


class WrapperError(KnowledgePackError, ValueError):
    """Soft tokens around packs, their training or their file, that cannot be used."""


class WrapperMismatchError(FingerprintMismatchError, WrapperError):
    """Soft tokens that were trained for another model than the one they are to wrap packs for."""


class BusyError(KnowledgePackError):
    """More background work was given to an engine than it keeps."""


class CacheBudgetError(KnowledgePackError, MemoryError):
    """A prompt with its answer has more KV than the engine's memory for KV, `cache_bytes`, may hold in all."""


class GenerationTimeoutError(KnowledgePackError, TimeoutError):
    """An answer that took longer than `timeout` seconds; its memory was given back."""
