"""Measures how an approximate composer changes answers, against exact composition on the user's own prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kp_core.compose import (
    BlendComposer,
    Composer,
    ExactComposer,
    PacketComposer,
    SelectComposer,
    SpliceComposer,
    composer_of,
)
from kp_core.engines.request import Request
from kp_core.errors import OptionError
from kp_core.packs.blobs import Blobs
from kp_core.packs.pack import common_length
from kp_core.packs.view import PackView
from kp_core.plan import Plan
from kp_core.prompt.conversation import Message

if TYPE_CHECKING:
    from kp_core.engines.session import Session

__all__ = ["Calibration", "Comparison", "blob_key", "calibrate_composer", "compare_composers", "warn_of_approximation"]

logger = logging.getLogger(__name__)

THRESHOLD = 0.95
"""Share of answers that must equal those of exact composition; below it, using the composer logs a warning."""
_COMPOSERS: tuple[Composer, ...] = (
    SpliceComposer(),
    BlendComposer(0.15, "first"),
    BlendComposer(0.15, "deviation"),
    BlendComposer(0.15, "attention"),
    SelectComposer(),
)


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
    composers: Sequence[Composer | str] | None = None,
    *,
    max_tokens: int = 24,
    **options: Any,  # noqa: ANN401 - of `Request`
) -> tuple[Comparison, ...]:
    """Compare each of `composers` (by default splice, the three rules of blend, and select) with exact composition.

    Each answers `messages` greedily, with at most `max_tokens` tokens. Before each answer, all KV that is neither
    pinned nor in use is dropped. KV that the store keeps of earlier requests is not read. So times are those of a first
    use. Raises as `Session.generate`.
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
    for composer in _COMPOSERS if composers is None else composers:
        candidate = answer(composer)
        comparisons.append(
            Comparison(
                composer if isinstance(composer, str) else composer.key,
                _divergence(exact.first_logits, candidate.first_logits),
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


@dataclass(frozen=True)
class Calibration:
    """The measured quality of one composer with one model, over so many `questions`."""

    composer: str
    model: str
    """Identity of the model."""
    questions: int
    same: float
    """Share of the answers that have the same tokens as with exact composition."""
    agreement: float
    """Mean share of an exact answer before the first token that differs."""
    kl: float
    """Mean KL divergence of the first token's distribution, in nats."""
    faster: float
    """Median time to first token of exact composition, divided by the median of this composer."""

    @property
    def is_safe(self) -> bool:
        """Whether at least 95 % of its answers equal those of exact composition."""
        return self.same >= THRESHOLD

    def __str__(self) -> str:
        return f"{self.same:.0%} of {self.questions} answers are those of exact composition"


def calibrate_composer(
    session: Session,
    questions: Iterable[Sequence[Message] | str],
    composer: Composer | str = "splice",
    **options: Any,  # noqa: ANN401
) -> Calibration:
    """Measure `composer` on your questions, each with the handles of its packs.

    `options` are those of `compare_composers`. With `view=store.view(...)` the result is stored beside the packs. Then
    the warning on use of the composer gives the measured share of equal answers; from 95 % on, there is no warning.
    Raises `OptionError` without questions, or when no question has packs to compose.
    """
    comparisons = [compare_composers(session, question, [composer], **options)[0] for question in questions]
    rows = [row for row in comparisons if row.approximate_tokens or row.unread_packs]
    if not rows:
        raise OptionError(
            f"Got {len(comparisons)} questions, none with a pack that {composer!r} would compose; expected questions "
            "with the handles of at least two packs each."
        )

    def median(values: Iterable[float]) -> float:
        return float(torch.tensor(list(values)).median())

    count = len(rows)
    calibration = Calibration(
        composer_of(composer).key if isinstance(composer, str) else composer.key,
        session.fingerprint.identity,
        count,
        sum(row.same for row in rows) / count,
        sum(row.agreement for row in rows) / count,
        sum(row.kl for row in rows) / count,
        median(row.exact_ttft_s for row in rows) / median(row.ttft_s for row in rows),
    )
    view: PackView | None = options.get("view")
    if view is not None and (blobs := view.source.blobs) is not None:
        blobs.write(
            blob_key(calibration.composer, calibration.model), [json.dumps(asdict(calibration), indent=2).encode()]
        )
    return calibration


def warn_of_approximation(plan: Plan, request: Request, model: str, warned: set[tuple[str, str]]) -> None:
    """Log a warning for each approximate composer in `plan` that no measurement has shown to be safe.

    `warned` collects the stores and composers, so that the warning comes once for each.
    """
    blobs = None if request.view is None else request.view.source.blobs
    keys = {request.composer.key} if plan.prompt.unread else set()
    keys |= {region.composer.key for region in plan.regions if region.composer and not region.composer.exact}
    for key in keys - {"accept"}:  # `mismatch="accept"` asks for other numerics, so it needs no warning.
        if (str(blobs), key) in warned:
            continue
        warned.add((str(blobs), key))
        calibration = None if blobs is None else _stored(blobs, key, model)
        if calibration is None:
            logger.warning(
                "Answers with composer %r are approximate, and nothing says how good they are on your data: "
                "measure with `kp_core.calibrate_composer(engine, questions, composer, view=...)`.",
                key,
            )
        elif not calibration.is_safe:
            logger.warning("Answers with composer %r are approximate: %s.", key, calibration)


def _stored(blobs: Blobs, composer: str, model: str) -> Calibration | None:
    with suppress(FileNotFoundError, TypeError, ValueError):
        calibration = Calibration(**json.loads(bytes(blobs.read(blob_key(composer, model)))))
        return calibration if (calibration.composer, calibration.model) == (composer, model) else None
    return None


def blob_key(composer: str, model: str) -> str:
    """Where a measurement of `composer` with `model` is stored beside the packs."""
    return f"composers/{blake2b(f'{model} {composer}'.encode(), digest_size=16).hexdigest()}.json"


def _divergence(exact: Tensor | None, found: Tensor | None) -> float:
    if exact is None or found is None:
        return float("nan")
    expected, approximate = (logits.double().log_softmax(dim=-1) for logits in (exact, found))
    return float((expected.exp() * (expected - approximate)).sum())
