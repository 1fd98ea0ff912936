"""Moves packs to their positions in the prompt. They do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core import Prompt, Span
from kp_core.errors import PackError
from kp_core.plan.composer import Host
from kp_methods.calibration import MeasuredComposer


@dataclass(frozen=True)
class SpliceComposer(MeasuredComposer):
    """Copies each pack's KV, with keys rotated by RoPE to their new positions (Prompt Cache, arXiv 2311.04934, moved).

    Packs were compiled behind the template's prefix, which is not copied: the prompt keeps one attention sink, its own
    beginning. Packs do not see each other; the question sees them all. The cost is a copy of the tokens. Tokens between
    packs are computed in the pass of the tokens behind them. Approximate: measure with `kp calibrate` first.
    """

    key = "splice"

    def layout(self, prompt: Prompt, moved: Sequence[Span], host: Host) -> tuple[Prompt, Sequence[Span]]:  # noqa: ARG002
        """All packs.

        Raises `PackError` if two of them were compiled behind different prefixes, as their tokens then saw different
        context.
        """
        by_prefix = {span.pack.prefix: span for span in moved if span.pack.kv is not None or span.pack.stored_bytes}
        if len(by_prefix) > 1:
            first, second, *_ = by_prefix.values()
            raise PackError(
                f"Got {first.handle} compiled behind {len(first.pack.prefix)} tokens and {second.handle} behind "
                f"{len(second.pack.prefix)}, or others; a composer that moves packs expects one prefix. Build both "
                "with the same `compiled_for`, or use composer='exact'."
            )
        return prompt, moved
