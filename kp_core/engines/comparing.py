"""Measures how an approximate composer changes answers, against exact composition on the user's own prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kp_core.compose import Composer, ExactComposer, PacketComposer, composer_of
from kp_core.packs.pack import common_length
from kp_core.prompt.conversation import Message

if TYPE_CHECKING:
    from kp_core.engines.session import Session

__all__ = ["Comparison", "blob_key", "compare_composers"]


@dataclass(frozen=True)
class Comparison:
    """One composer on one prompt, compared with exact composition of the same token ids."""

    composer: str
    kl: float
    """KL divergence of the first token's distribution from the exact one, KL(exact || composer), in nats."""
    same: bool
    """Whether both greedy answers have the same tokens."""
    agreement: float
    """Share of the exact answer before the first token that differs."""
    ttft_s: float
    """Seconds to the first token, with nothing of the prompt in memory."""
    exact_ttft_s: float
    """The same for exact composition."""
    computed_tokens: int
    approximate_tokens: int
    unread_packs: int


def compare_composers(
    session: Session,
    messages: Sequence[Message] | str,
    composers: Sequence[Composer | str] = ("splice", "select"),
    *,
    max_tokens: int = 24,
    **options: Any,  # noqa: ANN401 - of `Request`
) -> tuple[Comparison, ...]:
    """Compare each of `composers` with exact composition.

    Each answers `messages` greedily, with at most `max_tokens` tokens, and times are those of a first use: KV in memory
    that is not in use is dropped, and KV that the store keeps is not read. Raises as `Session.generate`.
    """
    # The first request has one-time costs that belong to no composer.
    session.prefill(messages, **options | {"composer": ExactComposer(), "keep": "never"})

    def answer(composer: Composer | str) -> Any:  # noqa: ANN401
        session.clear_cache()
        resolved = composer_of(composer) if isinstance(composer, str) else composer
        answer_options = options | {"composer": resolved, "max_tokens": max_tokens}
        # Wrapped packs are compiled once and kept, as packs are.
        return session.generate(
            messages, **answer_options if isinstance(resolved, PacketComposer) else answer_options | {"keep": "never"}
        )

    exact = answer(ExactComposer())
    comparisons = []
    for composer in composers:
        candidate = answer(composer)
        comparisons.append(
            Comparison(
                composer if isinstance(composer, str) else composer.key,
                _divergence(exact.logits, candidate.logits),
                exact.token_ids == candidate.token_ids,
                common_length(exact.token_ids, candidate.token_ids) / max(len(exact.token_ids), 1),
                candidate.usage.ttft_s,
                exact.usage.ttft_s,
                candidate.usage.computed_tokens,
                candidate.usage.approximate_tokens,
                candidate.usage.unread_packs,
            )
        )
    session.clear_cache()
    return tuple(comparisons)


def blob_key(what: str, model: str) -> str:
    """Where `what` was measured of `model` is stored beside the packs."""
    return f"composers/{blake2b(f'{model} {what}'.encode(), digest_size=16).hexdigest()}.json"


def _divergence(exact: Tensor | None, found: Tensor | None) -> float:
    if exact is None or found is None:
        return float("nan")
    expected, approximate = (logits.double().log_softmax(dim=-1) for logits in (exact, found))
    return float((expected.exp() * (expected - approximate)).sum())
