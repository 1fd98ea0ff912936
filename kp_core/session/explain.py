"""Shows a plan as a table: the source of the KV of each part of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kp_core.plan.plan import Plan


@dataclass(frozen=True)
class Row:
    """The tokens `start:stop` of a prompt: what they are, and the source of their KV.

    `source` is `tree` (in memory), `pack` (stored), `kept` (stored by an earlier request), `composed` (by the composer
    `method`), `steered` or `computed`.
    """

    start: int
    stop: int
    what: str
    source: str
    method: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Explanation:
    """What a request would do, before anything is computed. `str` gives a table."""

    rows: tuple[Row, ...]
    token_budget: int
    is_bitwise: bool = True
    """Whether reused KV has the same bits as computed KV."""
    choice: str = ""
    """The composer that was chosen, and why, if the request left that open."""
    miss: str = ""
    """See `Usage.miss`."""

    @classmethod
    def of(cls, plan: Plan, found: int, *, is_bitwise: bool, miss: str) -> Explanation:
        """The explanation of `plan`, when the prefix tree has the first `found` tokens of its prompt."""
        rows = list[Row]()
        for start, stop, source, region in plan.sources(found):
            method = region.composer.key if region.composer and source == "composed" else ""
            rows.append(Row(start, stop, _what(plan, start, stop), source, method))
        return cls(tuple(rows), plan.token_budget, is_bitwise, plan.choice, miss)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of tokens by source."""
        by_source = Counter[str]()
        for row in self.rows:
            by_source[row.source] += row.tokens
        return by_source

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        rows = [{**asdict(row), "tokens": row.tokens} for row in self.rows]
        summary = {name: value for name, value in asdict(self).items() if name != "rows"}
        return {"regions": rows, "tokens": dict(self.counts), **summary}

    def __str__(self) -> str:
        cells = [("tokens", "from", "to", "source", "what")]
        for row in self.rows:
            source = f"{row.source} ({row.method})" if row.method else row.source
            cells.append((str(row.tokens), str(row.start), str(row.stop), source, row.what))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, ">>><<", widths, strict=True)).rstrip()
            for row in cells
        ]
        total = ", ".join(f"{tokens} {source}" for source, tokens in self.counts.items())
        rounding = "" if self.is_bitwise else "; what is reused may round differently from what would be computed"
        chosen = [f"composer: {self.choice}"] if self.choice else []
        last = f"{total}; the answer may take {self.token_budget} tokens{rounding}"
        return "\n".join([*lines, *chosen, last + (f". {self.miss}" if self.miss else "")])


def _what(plan: Plan, start: int, stop: int) -> str:
    """A description of the tokens `start:stop`: the packs in them, or that they are text."""
    spans = [span for span in plan.prompt.spans if span.start < stop and start < span.stop]
    names = [f"{span.handle} {span.pack.text[:32]!r}" for span in spans]
    is_all = len(spans) == 1 and spans[0].start <= start and stop <= spans[0].stop
    return "text" if not names else ", ".join(names if is_all else ["text", *names])
