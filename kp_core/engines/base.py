"""The interface to a model: an engine takes plans and gives tokens and KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kp_core.errors import UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.plan import Limit, Plan
from kp_core.tools import Scores

__all__ = ["CAPABILITIES", "AttendingEngine", "CachingEngine", "Engine", "FinishReason", "TokenStream", "refusal"]

FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "cancelled"]

CAPABILITIES = {
    "attention": "attention weights on packs, which `composer='select'` chooses by (`AttendingEngine`)",
    "batch": "answers that are asked for at the same time, one forward pass for the next token of all",
    "bitwise": "the same bits however a prompt is cut into passes, cached, batched or restarted",
    "cache": "a prefix tree that can be looked into, cleared and pinned (`CachingEngine`)",
    "compose": "KV of packs from composers other than the exact one",
    "grammar": "answers held to a grammar: tools and response schemas",
    "kv": "KV of given tokens: building packs and steerings",
    "lazy": "packs without KV, which is computed when they are first used",
    "logits": "the logits behind a prompt",
    "logprobs": "the log-probabilities of generated tokens",
    "losses": "the likelihood of a given answer",
    "sampling": "temperature, top_p, top_k, repetition_penalty and seed",
    "steer": "altered values and keys",
}
"""The names that `Engine.supports` may contain, each with its meaning."""


class TokenStream:
    """The tokens of one answer as they are generated, and their cost so far.

    Iterating prefills and generates; `close` stops and releases the memory. `tokens` is called with this stream,
    returns the iterator, and may set the attributes of the stream.
    """

    def __init__(self, tokens: Callable[[TokenStream], Iterator[int]]) -> None:
        self.computed_tokens = 0
        """Tokens of the prompt that were prefilled; the KV of all others was available."""
        self.approximate_tokens = 0
        """Tokens of the prompt whose KV an approximate composer made."""
        self.state_bytes = 0
        """Bytes of the recurrent-layer states kept for the prompt."""
        self.finish: FinishReason = "length"
        """Why the stream ended: `"stop"` after an end token, `"cancelled"`, else `"length"`."""
        self.first_logits: Tensor | None = None
        """Logits after the prompt, `(vocabulary,)`. Engines that support `logits` set them after the prefill."""
        self.losses: list[float] = []
        """The negative log-probability of each token of a forced answer."""
        self.logprobs: list[Scores] = []
        """With `Sampling.gives_logprobs`, those of each token so far, added before the token is given."""
        self.limit = Limit()
        """When a long prefill must end early, with the finish `"cancelled"` and no token. The session sets it before it
        reads the first token, and checks it itself after each token."""
        self._tokens = tokens(self)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> int:
        return next(self._tokens)

    def close(self) -> None:
        """Stop generating and release the memory."""
        close = getattr(self._tokens, "close", None)
        if close is not None:
            close()


@runtime_checkable
class Engine(Protocol):
    """Runs a model. Nothing else touches the model; a `Session` builds conversations on this interface."""

    @property
    def identity(self) -> ModelFingerprint:
        """The model and its numerics."""

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - of the transformers family, with or without weights
        """The model's tokenizer, with Hugging Face's `encode`, `decode`, `chat_template` and `backend_tokenizer`."""

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def supports(self) -> frozenset[str]:
        """What it can do beyond greedy answers, as names from `CAPABILITIES`."""

    @property
    def lacks(self) -> Mapping[str, str]:
        """The reasons why it lacks capabilities, by name; need not cover all of them."""

    def run(self, plan: Plan) -> TokenStream:
        """The answer to a plan. Refuses an impossible plan at the call; prefills when the first token is read."""

    def kv(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:
        """The KV of `plan.wanted` for each plan, in order: per layer `(kv_heads, tokens, head_dim)`."""


class CachingEngine(Engine, Protocol):
    """An engine with the capability `cache`."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of KV in the prefix tree."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token."""

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent-layer states at each end of a pack or a message; 0 for models without such layers."""

    def found(self, plan: Plan) -> int:
        """How many tokens of the prompt, from the first on, are in the prefix tree now."""

    def pin(self, plan: Plan) -> object:
        """Keep the prompt of `plan` in the prefix tree until `unpin` is called with the returned object."""

    def unpin(self, pinned: object) -> None:
        """Undo one `pin`."""

    def clear_cache(self) -> None:
        """Drop all KV that is neither pinned nor in use."""

    def refresh(self) -> None:
        """Start to use the model as it is now. Raises `BusyError` while KV is pinned or in use."""


class AttendingEngine(Engine, Protocol):
    """An engine with the capability `attention`."""

    def attention(self, plan: Plan, layers: int | None = None) -> Tensor | None:
        """How much the tokens behind the last region of `plan` attend to each token in it.

        The region is composed: the KV of its packs is moved there, and the tokens between them are masked. The result
        is the largest weight of a token behind the region on each of its tokens, `(layers, heads, tokens)`, of the
        first `layers` if given. `None` if a pack has no KV.
        """


def refusal(engine: Engine, name: str, capability: str, what: str) -> UnsupportedRequestError:
    """The error that says that `engine`, called `name`, does not offer `what`.

    It gives the reason if the engine has one in `lacks`; otherwise it names an engine that offers `what`.
    """
    if reason := engine.lacks.get(capability):
        return UnsupportedRequestError(f"{name} does not offer {what}: {reason}.")
    return UnsupportedRequestError(
        f"{name} does not offer {what} ({CAPABILITIES[capability]}). `kp_core.load_engine(model)`, which runs the "
        "model on this machine, does."
    )
