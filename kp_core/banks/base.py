"""`Fact`, and what searching and adding facts return."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

from kp_core.errors import FactError
from kp_core.packs.handle import check_namespace

_DIGEST_BYTES = 16
_DEFAULT_NAMESPACE = "default"
_DEEPEST, _BITS = 16, 4096
LATEST = 1e15
"""The largest time and duration, in seconds."""

Value: TypeAlias = str | int | float | bool | Sequence["Value"] | Mapping[str, "Value"] | None
"""Values that a metadata field may have: everything JSON can express."""

Filter: TypeAlias = Mapping[str, object]
"""Selects facts; see `kp_core.banks.filters`."""


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge: `text` is embedded and goes into a pack; the other fields describe it.

    The default `id` is a BLAKE2b digest of namespace, source and text, so one text from two sources is two facts. The
    fact's pack has the same `namespace`, and a search may be limited to one. Searches ignore the fact from `expires` on
    (seconds since 1970, UTC). `version` counts the texts that a store has had under this id, from 1.

    Raises `FactError` for a text that is blank or not Unicode, and for metadata that JSON cannot express; `PromptError`
    for an invalid namespace.
    """

    text: str
    title: str = ""
    source: str = ""
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)
    id: str = ""
    namespace: str = _DEFAULT_NAMESPACE
    expires: float | None = None
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("text", "title", "source", "id", "namespace"):
            _check_text(name, getattr(self, name))
        if not self.text.strip():
            raise FactError(f"Got the blank text {self.text!r} (title {self.title!r}); expected a fact. Leave it out.")
        check_namespace(self.namespace)
        is_number = isinstance(self.expires, int | float) and not isinstance(self.expires, bool)
        if self.expires is not None and not (is_number and abs(self.expires) <= LATEST):
            raise FactError(f"Got expires={self.expires!r}; expected seconds since 1970, or None for never.")
        if type(self.version) is not int or self.version < 1:
            raise FactError(f"Got version={self.version!r} of a fact; expected an integer from 1 on.")
        if not isinstance(self.metadata, Mapping):
            raise FactError(f"Got {self.metadata!r} as metadata of a fact; expected a dictionary.")
        for key in self.metadata:
            _check_text("a metadata key", key)
        plain = {key: _plain(f"metadata {key!r}", value) for key, value in self.metadata.items()}
        object.__setattr__(self, "metadata", MappingProxyType(plain))
        if not self.id:
            object.__setattr__(self, "id", content_id(self.text, self.namespace, self.source))

    def moved(self, namespace: str | None) -> Fact:
        """Return the fact in `namespace`; unchanged if that is `None` or if the fact's namespace is not `default`."""
        if namespace is None or self.namespace != _DEFAULT_NAMESPACE or namespace == self.namespace:
            return self
        return replace(self, namespace=namespace, id=self.id if self.is_named else "")

    @property
    def is_named(self) -> bool:
        """Whether the id was given, and is not the default one."""
        return self.id != content_id(self.text, self.namespace, self.source)

    @cached_property
    def digest(self) -> str:
        """BLAKE2b digest of the text."""
        return content_id(self.text)

    def __reduce__(self) -> tuple[type[Fact], tuple[object, ...]]:
        # A mapping proxy cannot be pickled, and facts are sent between processes.
        fields = (self.text, self.title, self.source, dict(self.metadata), self.id, self.namespace)
        return Fact, (*fields, self.expires, self.version)


def content_id(text: str, namespace: str = _DEFAULT_NAMESPACE, source: str = "") -> str:
    """Return the default id of a fact."""
    content = text if namespace == _DEFAULT_NAMESPACE else f"{namespace}\0{text}"
    if source:
        content = f"{len(source)}:{source}{namespace}\0{text}"
    return hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True)
class Hit:
    """A search result: the fact, its cosine with the question in [-1, 1], and its bank if banks were searched."""

    fact: Fact
    score: float
    bank: str | None = None


@dataclass(frozen=True)
class Added:
    """How many facts are new, how many were already stored, and the ids whose later, stored version stays."""

    added: int = 0
    duplicates: int = 0
    superseded: tuple[str, ...] = ()

    def __add__(self, other: Added) -> Added:
        superseded = self.superseded + other.superseded
        return Added(self.added + other.added, self.duplicates + other.duplicates, superseded)


def _plain(name: str, value: Any, depth: int = 0) -> Value:  # noqa: ANN401 - whatever a user gives
    """Return `value` with numpy's numbers and arrays as Python's; raises for what JSON cannot express."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, int) and value.bit_length() > _BITS:
        bits = value.bit_length()
        raise FactError(f"Got a number of {bits} bits as {name} of a fact; expected at most {_BITS}. Write it as text.")
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        items = [_plain(name, item, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and depth < _DEEPEST:
        for key in value:
            _check_text(f"a key in {name}", key)
        return {key: _plain(name, item, depth + 1) for key, item in value.items()}
    if not isinstance(value, str):
        raise FactError(f"Got {value!r} as {name} of a fact; expected what JSON can say: text, finite numbers, lists.")
    _check_text(name, value)
    return value


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise FactError(f"Got {value!r} ({type(value).__name__}) as {name} of a fact; expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FactError(
            f"Got {value!r} as {name} of a fact, which no file can hold ({error.reason}). "
            f"Repair it, e.g. with `.encode(errors='replace').decode()`."
        ) from error
