"""Errata: what a pack says is corrected by a line behind it, and all that stands before stays as it is.

A field that is edited in the KV alone is ignored, as what was computed behind it has taken note of the old value; an
erratum behind it is heeded, and keeps the prefix cached (Models Take Notes at Prefill, arXiv 2606.17107).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from kp_core.edit.rebuild import compiled, tokenised
from kp_core.edit.statement import find, sentence_around
from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import PackError
from kp_core.packs.edits import Correction, Edit, Edits, root_of
from kp_core.packs.pack import KnowledgePack, common_length

__all__ = ["amend", "current_text", "squash"]

logger = logging.getLogger(__name__)

_WORDING = 'Correction: {sentence} This replaces "{old}".'
"""Chosen among seventeen (`docs/editing.md`). Packs keep the lines they have; those of earlier wordings still count."""


def amend(  # noqa: PLR0913 - what an edit takes
    pack: KnowledgePack,
    old: str,
    new: str,
    engine: Session,
    *,
    compiled_for: CompiledFor | None = None,
    squash_above: float = 0.2,
) -> KnowledgePack:
    """`pack` with an erratum behind it: where it says `old`, `new` holds. Only the erratum's tokens are computed.

    A second correction of the same field takes the place of the first; others stand in the order they came in. Where
    errata would be more than the share `squash_above` of the text, the result is that of `squash`. In a conversation
    that holds an earlier version of the pack, the new one is the erratum alone (`kp_core.prompt.conversation`). The
    text is what the tokens say, errata included; `current_text` tells what holds. Raises `PackError` when `old` is not
    found or found twice, for an empty `new`, and as `rebuild`.
    """
    edits, base = pack.edits, _base(pack)
    kept, found = _corrected(pack, old, new)
    corrections = list(kept)
    if base[found.start : found.stop] != found.new:  # Else it is as it was before all corrections.
        corrections.append(replace(found, line=_line(base, found, kept)))
    lines = [each.line for each in corrections]
    text = base + "".join(f"\n{line}" for line in lines) if not base.endswith("\n") else base + "\n".join(lines)
    made = tokenised(pack, text, engine, compiled_for)
    reused = common_length(pack.token_ids, made.token_ids)
    kept_starts = (at for at in edits.starts if at < reused)
    starts = (*kept_starts, reused) if reused and corrections else ()
    now = Edits(
        edits.root or root_of(pack.text),
        edits.said,
        len(base),
        tuple(corrections),
        tuple(at for at in starts if at < len(made.token_ids)),
        (*edits.history, Edit("amend", old, new)),
    )
    first = starts[0] if starts else len(made.token_ids)
    if len(made.token_ids) - first > squash_above * first:
        logger.info("Errata are more than %.0f %% of %r; it is computed anew.", 100 * squash_above, text[:40])
        return _squashed(pack, _applied(base, corrections), now, engine, compiled_for)
    return compiled(pack, made, engine, now)


def squash(pack: KnowledgePack, engine: Session, *, compiled_for: CompiledFor | None = None) -> KnowledgePack:
    """`pack` with its errata in the text, computed anew, exact; a pack without errata as it is. Raises as `rebuild`."""
    if not pack.edits.corrections:
        return pack
    return _squashed(pack, current_text(pack), pack.edits, engine, compiled_for)


def current_text(pack: KnowledgePack) -> str:
    """What a pack says with its errata applied."""
    return _applied(_base(pack), pack.edits.corrections)


def _squashed(
    pack: KnowledgePack, text: str, edits: Edits, engine: Session, compiled_for: CompiledFor | None
) -> KnowledgePack:
    made = tokenised(pack, text, engine, compiled_for)
    history = (*edits.history, Edit("squash", "", ""))
    return compiled(pack, made, engine, Edits(edits.root, edits.errata, history=history))


def _base(pack: KnowledgePack) -> str:
    """The text that errata are about."""
    return pack.text[: pack.edits.base] if pack.edits.corrections else pack.text


def _applied(base: str, corrections: Sequence[Correction]) -> str:
    parts, done = [], 0
    for each in sorted(corrections, key=lambda each: each.start):
        parts += [base[done : each.start], each.new]
        done = each.stop
    return "".join((*parts, base[done:]))


def _corrected(pack: KnowledgePack, old: str, new: str) -> tuple[list[Correction], Correction]:
    """The corrections that stay, and the new one, without its line; `old` is what holds now, or what was corrected."""
    base, held = _base(pack), pack.edits.corrections
    try:
        start, stop = find(_applied(base, held), old, new)
    except PackError:
        # The field may be named by what the text itself says of it.
        own = [each for each in held if base[each.start : each.stop] == old]
        if len(own) != 1 or not new.strip():
            raise
        return [each for each in held if each is not own[0]], replace(own[0], new=new)
    places, shift = {}, 0
    for each in sorted(held, key=lambda each: each.start):
        places[each] = (each.start + shift, each.start + shift + len(each.new))
        shift += _grown(each)
    touched = sorted((c for c in held if places[c][0] < stop and places[c][1] > start), key=lambda each: each.start)
    first = start - sum(_grown(each) for each in held if places[each][1] <= start)
    last = stop - sum(_grown(each) for each in held if places[each][1] <= stop)
    if touched:  # What of earlier corrections stands around the new one stays.
        (low, _), (begin, high) = places[touched[0]], places[touched[-1]]
        if low < start:
            first, new = touched[0].start, touched[0].new[: start - low] + new
        if high > stop:
            last, new = touched[-1].stop, new + touched[-1].new[stop - begin :]
    return [each for each in held if each not in touched], Correction(first, last, new, "")


def _grown(each: Correction) -> int:
    """By how many characters a correction makes its text longer."""
    return len(each.new) - (each.stop - each.start)


def _line(base: str, each: Correction, others: Sequence[Correction]) -> str:
    """The erratum: what no longer holds and what does, and the sentence as it is now."""
    before = _applied(base[: each.start], [other for other in others if other.start < each.start])
    behind = [replace(other, start=other.start - each.stop, stop=other.stop - each.stop) for other in others]
    after = _applied(base[each.stop :], [other for other in behind if other.start >= 0])
    head, tail = sentence_around(before, after)
    return _WORDING.format(old=base[each.start : each.stop], sentence=f"{head}{each.new}{tail}")
