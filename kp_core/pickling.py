"""Copies and pickles of what holds a model or a database: copies share it, a pickle is the call that opens it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Self
from weakref import WeakValueDictionary

_here: WeakValueDictionary[str, Shared] = WeakValueDictionary()
_opened: dict[str, Shared] = {}


class Shared:
    """Something that copies share. In another process, a pickle opens it once, as `_opens` says."""

    _pickled_as: str | None = None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _opens(self) -> Callable[[], Shared]:
        """A function that can be pickled and opens it in another process. Raises `TypeError` if there is none."""
        raise TypeError(
            f"{self!r} cannot be pickled: no other process can open it. Open it in the process that needs it."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        opens = self._opens()
        self._pickled_as = self._pickled_as or uuid.uuid4().hex
        _here[self._pickled_as] = self
        return _shared, (self._pickled_as, opens)


class _Unopened:
    """Raises the error of what could not be opened when it is used."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise self._error


def _shared(key: str, opens: Callable[[], Shared]) -> Shared | _Unopened:
    found = _here.get(key)
    if found is None:
        try:
            found = opens()
        except Exception as error:  # noqa: BLE001 - a pool of processes waits forever for one that fails to unpickle
            return _Unopened(error)
        _here[key] = _opened[key] = found
        found._pickled_as = key  # noqa: SLF001 - one of ours
    return found
