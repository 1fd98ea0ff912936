"""Errata: a line appended to a pack corrects its text, and the text and its KV stay unchanged.

Models ignore a field that is edited in the KV alone, because the KV of later tokens still encodes the old value. They
follow an appended erratum, which also keeps the prefix cached (Models Take Notes at Prefill, arXiv 2606.17107).
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
"""The best of seventeen wordings (`docs/editing.md`). Packs keep errata in earlier wordings, which stay valid."""


def amend(  # noqa: PLR0913 - the arguments of an edit
    pack: KnowledgePack,
    old: str,
    new: str,
    engine: Session,
    *,
    compiled_for: CompiledFor | None = None,
    squash_above: float = 0.2,
) -> KnowledgePack:
    """`pack` with an appended erratum that corrects `old` to `new`. Only the tokens of the erratum are computed.

    A second correction of the same field replaces the first; other errata keep their order. If the errata are longer
    than the share `squash_above` of the text, in tokens, the result is that of `squash`. In a conversation that
    contains an earlier version of the pack, only the erratum is added (`kp_core.prompt.conversation`). The new pack's
    `text` includes the errata; `current_text` applies them. Raises `PackError` if `old` is not found or found twice,
    for an empty `new`, and as `rebuild`.
    """
    edits, base = pack.edits, _base(pack)
    others, correction = _corrected(pack, old, new)
    corrections = list(others)
    if base[correction.start : correction.stop] != correction.new:  # If equal, the field has its original text again.
        corrections.append(replace(correction, line=_line(base, correction, others)))
    lines = [erratum.line for erratum in corrections]
    text = base + "".join(f"\n{line}" for line in lines) if not base.endswith("\n") else base + "\n".join(lines)
    encoded = tokenised(pack, text, engine, compiled_for)
    reused = common_length(pack.token_ids, encoded.token_ids)
    kept_starts = (at for at in edits.starts if at < reused)
    starts = (*kept_starts, reused) if reused and corrections else ()
    new_edits = Edits(
        edits.root or root_of(pack.text),
        edits.said,
        len(base),
        tuple(corrections),
        tuple(at for at in starts if at < len(encoded.token_ids)),
        (*edits.history, Edit("amend", old, new)),
    )
    first = starts[0] if starts else len(encoded.token_ids)
    if len(encoded.token_ids) - first > squash_above * first:
        logger.info("Errata are more than %.0f %% of %r; it is computed anew.", 100 * squash_above, text[:40])
        return _squashed(pack, _applied(base, corrections), new_edits, engine, compiled_for)
    return compiled(pack, encoded, engine, new_edits)


def squash(pack: KnowledgePack, engine: Session, *, compiled_for: CompiledFor | None = None) -> KnowledgePack:
    """`pack` with its errata merged into the text, recomputed and exact. Raises as `rebuild`.

    A pack without errata is returned unchanged.
    """
    if not pack.edits.corrections:
        return pack
    return _squashed(pack, current_text(pack), pack.edits, engine, compiled_for)


def current_text(pack: KnowledgePack) -> str:
    """The text of a pack with its errata applied."""
    return _applied(_base(pack), pack.edits.corrections)


def _squashed(
    pack: KnowledgePack, text: str, edits: Edits, engine: Session, compiled_for: CompiledFor | None
) -> KnowledgePack:
    encoded = tokenised(pack, text, engine, compiled_for)
    history = (*edits.history, Edit("squash", "", ""))
    return compiled(pack, encoded, engine, Edits(edits.root, edits.errata, history=history))


def _base(pack: KnowledgePack) -> str:
    """The text of a pack without its errata."""
    return pack.text[: pack.edits.base] if pack.edits.corrections else pack.text


def _applied(base: str, corrections: Sequence[Correction]) -> str:
    parts, position = [], 0
    for correction in sorted(corrections, key=lambda entry: entry.start):
        parts += [base[position : correction.start], correction.new]
        position = correction.stop
    return "".join((*parts, base[position:]))


def _corrected(pack: KnowledgePack, old: str, new: str) -> tuple[list[Correction], Correction]:
    """The corrections to keep, and the new one, without its line.

    `old` is text that is valid now, or the original text of a corrected field.
    """
    base, existing = _base(pack), pack.edits.corrections
    try:
        start, stop = find(_applied(base, existing), old, new)
    except PackError:
        # `old` may be the original text of a corrected field.
        originals = [entry for entry in existing if base[entry.start : entry.stop] == old]
        if len(originals) != 1 or not new.strip():
            raise
        return [entry for entry in existing if entry is not originals[0]], replace(originals[0], new=new)
    places, shift = {}, 0
    for correction in sorted(existing, key=lambda entry: entry.start):
        places[correction] = (correction.start + shift, correction.start + shift + len(correction.new))
        shift += _grown(correction)
    touched = sorted(
        (entry for entry in existing if places[entry][0] < stop and places[entry][1] > start),
        key=lambda entry: entry.start,
    )
    first = start - sum(_grown(entry) for entry in existing if places[entry][1] <= start)
    last = stop - sum(_grown(entry) for entry in existing if places[entry][1] <= stop)
    if touched:  # The new correction includes the rest of the earlier corrections that it overlaps.
        (low, _), (begin, high) = places[touched[0]], places[touched[-1]]
        if low < start:
            first, new = touched[0].start, touched[0].new[: start - low] + new
        if high > stop:
            last, new = touched[-1].stop, new + touched[-1].new[stop - begin :]
    return [entry for entry in existing if entry not in touched], Correction(first, last, new, "")


def _grown(each: Correction) -> int:
    """Characters by which a correction lengthens the text."""
    return len(each.new) - (each.stop - each.start)


def _line(base: str, each: Correction, others: Sequence[Correction]) -> str:
    """The line of the erratum: the corrected sentence, and the old text that it replaces."""
    before = _applied(base[: each.start], [other for other in others if other.start < each.start])
    shifted = [replace(other, start=other.start - each.stop, stop=other.stop - each.stop) for other in others]
    after = _applied(base[each.stop :], [other for other in shifted if other.start >= 0])
    head, tail = sentence_around(before, after)
    return _WORDING.format(old=base[each.start : each.stop], sentence=f"{head}{each.new}{tail}")
