"""The interface to a model: an engine takes plans and gives tokens and KV."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable
from weakref import WeakSet

from torch import Tensor

from kp_core.kv import KVTensors
from kp_core.packs.entry import Entry
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.plan.plan import Limit, Plan
from kp_core.threads import computing
from kp_core.tools import Scores

FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "cancelled"]

CAPABILITIES = {
    "attention": "attention weights on packs, which composers may choose by",
    "batch": "answers that are asked for at the same time, one forward pass for the next token of all",
    "bitwise": "the same bits however a prompt is cut into passes, cached, batched or restarted",
    "compose": "KV of packs from composers other than the exact one",
    "grammar": "answers held to a grammar: tools and response schemas",
    "kv": "KV of given tokens: building packs and steerings",
    "lazy": "packs without KV, which is computed when they are first used",
    "logits": "the logits behind a prompt",
    "logprobs": "the log-probabilities of generated tokens",
    "sampling": "temperature, top_p, top_k, repetition_penalty and seed",
    "steer": "altered values and keys",
}
"""The names that `Engine.supports` may contain, each with its meaning."""


class TokenStream:
    """The tokens of one answer as they are generated, and their cost so far.

    `tokens` is called with this stream, returns the iterator, and may set the attributes of the stream.
    """

    def __init__(self, tokens: Callable[[TokenStream], Iterator[int]]) -> None:
        self.computed_tokens = 0
        """Tokens of the prompt that were prefilled; the KV of all others was available."""
        self.found_tokens = 0
        """Tokens of the prompt, from the first on, that were in memory when it began."""
        self.approximate_tokens = 0
        """Tokens of the prompt whose KV an approximate composer made."""
        self.finish: FinishReason = "length"
        """Why the stream ended: `"stop"` after an end token, `"cancelled"`, else `"length"`."""
        self.first_logits: Tensor | None = None
        """Logits after the prompt, `(vocabulary,)`. Engines that support `logits` set them after the prefill."""
        self.logprobs: list[Scores] = []
        """With `Sampling.gives_logprobs`, those of each token so far, added before the token is given."""
        self.kept: list[tuple[Entry, KVTensors]] = []
        """The KV of `Plan.keep`, on the CPU, as far as it was computed."""
        self.limit = Limit()
        """When a long prefill must end early, with the finish `"cancelled"` and no token. The session sets it before it
        reads the first token, and checks it itself after each token."""
        self.ttft_s = 0.0
        """Seconds from the call to the first token, without those that passed before the stream was first read. The
        session sets those of the call."""
        self._is_read = False
        self._tokens = tokens(self)
        _streams.add(self)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> int:
        if self._is_read:
            with computing:
                return next(self._tokens)
        self._is_read, began = True, time.perf_counter()
        with computing:
            token = next(self._tokens)
        self.ttft_s += time.perf_counter() - began
        return token

    def close(self) -> None:
        """Stop generating and release the memory."""
        close = getattr(self._tokens, "close", None)
        if close is not None:
            close()


_streams: WeakSet[TokenStream] = WeakSet()
if hasattr(os, "register_at_fork"):  # The other process closes them.
    os.register_at_fork(after_in_child=_streams.clear)


@atexit.register
def _close_streams() -> None:
    """Close abandoned streams while the modules that they need are still there."""
    for stream in [*_streams]:
        with suppress(ValueError):  # Another thread reads it.
            stream.close()


@runtime_checkable
class Engine(Protocol):
    """Runs a model. Nothing else touches the model; a `Session` builds conversations on this interface.

    What only some engines can do is a Protocol of its own: `Attends`, `Branches`, `HasCache`.
    """

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


@runtime_checkable
class Attends(Protocol):
    """An engine that tells where tokens attend to; every engine that supports `attention` is one."""

    def attention(self, plan: Plan, layers: int | None = None) -> Tensor | None:
        """How much the tokens behind the last region of `plan` attend to each token in it.

        The largest weight of a token behind the region on each of its tokens, `(layers, heads, tokens)`, of the first
        `layers` if given. `None` if a pack has no KV.
        """


@runtime_checkable
class Branches(Protocol):
    """An engine that computes prompts with a common beginning together."""

    def branch(
        self, plans: Sequence[Plan], stream: TokenStream, tokens: Sequence[Collection[int]]
    ) -> Generator[Tensor]:
        """The logits behind the prompt of each plan, `(vocabulary,)`, in order. `stream` gets the cost of all.

        An engine may leave out tokens that are not in `tokens` of the plan, as NaN; then the others are
        log-probabilities.

        Raises `CancelledError` at `stream.limit`.
        """


@runtime_checkable
class HasCache(Protocol):
    """An engine with KV in memory that requests share."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of KV in memory that requests may share."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers at each end of a pack or a message."""

    def cached_tokens(self, plan: Plan) -> int:
        """How many tokens of the prompt, from the first on, are in memory now."""

    def clear_cache(self) -> None:
        """Drop all KV that is not in use."""

    def refresh(self) -> None:
        """Start to use the model as it is now. Raises `ModelError` while KV is in use."""


@runtime_checkable
class Compiles(Protocol):
    """An engine on a server that compiles packs in a store of its own."""

    base_url: str
    """Address of the server."""

    def compile(
        self, text: str, namespace: str, compiled_for: str = "user", provenance: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """Have the server compile a text and store its pack; returns what the server says of it."""

    def forget(self, text: str, namespace: str) -> None:
        """Have the server delete its pack of a text, if it has one."""
