"""Editing: makes a new pack from a pack and a change. The old pack stays unchanged under its own handle.

`amend` appends a short erratum to the text, `rebuild` computes the changed text, `squash` merges errata into the text,
and `overwrite` replaces only the KV of a field, which is an approximation.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from kp_core.edit.amend import amend, current_text, squash
from kp_core.edit.overwrite import overwrite
from kp_core.edit.rebuild import rebuild
from kp_core.edit.statement import replaced
from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import OptionError
from kp_core.packs.pack import KnowledgePack

__all__ = ["How", "amend", "current_text", "edit", "overwrite", "rebuild", "replaced", "squash"]

How: TypeAlias = Literal["amend", "overwrite", "rebuild"]


def edit(  # noqa: PLR0913 - the arguments of the functions it calls
    pack: KnowledgePack,
    old: str,
    new: str,
    engine: Session,
    *,
    how: How = "amend",
    compiled_for: CompiledFor | None = None,
) -> KnowledgePack:
    """`pack` with `old` changed to `new` by the function `how`; raises as that, and `OptionError` for another `how`."""
    if how not in get_args(How):
        raise OptionError(f"Got how={how!r}; expected one of {', '.join(get_args(How))}.")
    if how == "rebuild":
        return rebuild(pack, replaced(current_text(pack), old, new), engine, compiled_for=compiled_for)
    return (amend if how == "amend" else overwrite)(pack, old, new, engine, compiled_for=compiled_for)
