"""The reference bank: everything in memory, vectors as floats."""

from __future__ import annotations

from collections.abc import Sequence

from kp_core.facts.base import Fact
from kp_core.facts.journal import Change
from kp_core.facts.routing import RoutedBank
from kp_core.facts.rows import FloatRows, Rows

__all__ = ["MemoryFactBank"]


class MemoryFactBank(RoutedBank):
    """A `FactBank` in memory, gone with the process; what `ChromaFactBank` is compared with."""

    def _new_rows(self) -> Rows:
        return FloatRows()

    def _keep(self, changes: Sequence[Change], first_row: int) -> None:
        pass

    def _followed(self, added: Sequence[int], removed: Sequence[Fact]) -> None:
        pass

    def _settled(self) -> None:
        pass

    def _switched(self, *, compacted: bool) -> None:
        pass
