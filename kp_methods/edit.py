"""Editing: makes a new pack from a pack and a change. The old pack stays unchanged under its own handle.

Models ignore a field that is edited in the KV alone, because the KV of later tokens still encodes the old value. They
follow an appended erratum, which also keeps the prefix cached (Models Take Notes at Prefill, arXiv 2606.17107).
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, TypeAlias, get_args

from kp_core import KVTensors, Prompt, Region, Session, Span
from kp_core.banks.base import Fact
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError, OptionError, PackError, UnsupportedRequestError
from kp_core.packs.fingerprint import OVERWRITTEN
from kp_core.packs.pack import Correction, Edit, Edits, KnowledgePack, common_length, root_of
from kp_core.packs.view import PackRef
from kp_core.plan.plan import Plan, plan_regions
from kp_core.plan.request import CompiledFor
from kp_methods.splice import SpliceComposer

logger = logging.getLogger(__name__)

How: TypeAlias = Literal["amend", "overwrite", "rebuild"]

_WORDING = 'Correction: {sentence} This replaces "{old}".'
"""The best of seventeen wordings. Packs keep errata in earlier wordings, which stay valid."""
_END = re.compile(r"(?<=[.!?])\s+|\n+")
_SHOWN = 30  # Characters of context that error messages show on each side of a match.
_LONGEST = 240  # Most characters of the sentence that an erratum repeats on each side of the correction.


def edit(  # noqa: PLR0913 - the arguments of the functions it calls
    pack: KnowledgePack,
    old: str,
    new: str,
    session: Session,
    *,
    how: How = "amend",
    compiled_for: CompiledFor | None = None,
) -> KnowledgePack:
    """`pack` with `old` changed to `new` by the function `how`; raises as that, and `OptionError` for another `how`."""
    if how not in get_args(How):
        raise OptionError(f"Got how={how!r}; expected one of {', '.join(get_args(How))}.")
    if how == "rebuild":
        return rebuild(pack, replaced(current_text(pack), old, new), session, compiled_for=compiled_for)
    return (amend if how == "amend" else overwrite)(pack, old, new, session, compiled_for=compiled_for)


def edit_fact(delivery: Delivery, fact_id: str, old: str, new: str, *, how: How = "amend") -> Fact:
    """Correct a fact: replace the statement `old` by `new`, as `edit` does. Returns the corrected fact.

    Searches return the handle of the edited pack from now on; that of the old text stays until `gc`. A unit of several
    facts is compiled anew, only with `how="rebuild"`. Raises `FactError` for other ways there, and for an unknown fact;
    `PackError` if the fact does not contain the statement exactly once, and if packs are lazy.
    """
    if delivery.unit == "fact":
        place = delivery.compiled_for
        return delivery.change(
            fact_id, lambda pack, session: edit(pack, old, new, session, how=how, compiled_for=place)
        )
    if how != "rebuild":
        raise FactError(f"Got how={how!r} for packs of whole {delivery.unit}s; these take how='rebuild'.")
    fact = delivery.facts.get(fact_id, namespace=delivery.namespace)
    return delivery.update(replace(fact, text=replaced(fact.text, old, new)))


def amend(  # noqa: PLR0913 - the arguments of an edit
    pack: KnowledgePack,
    old: str,
    new: str,
    session: Session,
    *,
    compiled_for: CompiledFor | None = None,
    squash_above: float = 0.2,
) -> KnowledgePack:
    """`pack` with an appended erratum that corrects `old` to `new`. Only the tokens of the erratum are computed.

    A second correction of the same field replaces the first. If the errata are longer than the share `squash_above` of
    the text, in tokens, the result is that of `squash`. The new pack's `text` includes the errata; `current_text`
    applies them. Raises `PackError` if `old` is not found or found twice, for an empty `new`, and as `rebuild`.
    """
    base = _base(pack)
    edits = pack.edits
    others, correction = _corrected(pack, old, new)
    corrections = list(others)
    if base[correction.start : correction.stop] != correction.new:  # If equal, the field has its original text again.
        corrections.append(replace(correction, line=_line(base, correction, others)))
    lines = [erratum.line for erratum in corrections]
    text = base + "".join(f"\n{line}" for line in lines) if not base.endswith("\n") else base + "\n".join(lines)
    token_ids = _tokenised(pack, text, session, compiled_for)
    reused = common_length(pack.token_ids, token_ids)
    kept_starts = (at for at in edits.starts if at < reused)
    starts = (*kept_starts, reused) if reused and corrections else ()
    new_edits = Edits(
        edits.root or root_of(pack.text),
        edits.said,
        len(base),
        tuple(corrections),
        tuple(at for at in starts if at < len(token_ids)),
        (*edits.history, Edit("amend", old, new)),
    )
    first = starts[0] if starts else len(token_ids)
    if len(token_ids) - first > squash_above * first:
        logger.info("Errata are more than %.0f %% of %r; it is computed anew.", 100 * squash_above, text[:40])
        return _squashed(pack, _applied(base, corrections), new_edits, session, compiled_for)
    return _compiled(pack, text, token_ids, session, new_edits)


def squash(pack: KnowledgePack, session: Session, *, compiled_for: CompiledFor | None = None) -> KnowledgePack:
    """`pack` with its errata, if any, merged into the text, recomputed and exact. Raises as `rebuild`."""
    if not pack.edits.corrections:
        return pack
    return _squashed(pack, current_text(pack), pack.edits, session, compiled_for)


def current_text(pack: KnowledgePack) -> str:
    """The text of a pack with its errata applied."""
    return _applied(_base(pack), pack.edits.corrections)


def rebuild(
    pack: KnowledgePack, text: str, session: Session, *, compiled_for: CompiledFor | None = None
) -> KnowledgePack:
    """A pack of `text` in place of `pack`: bit for bit that of `engine.build_pack(text)` for the same place.

    The tokens before the change are not computed again. `compiled_for` is needed if the pack was compiled for messages
    of your own. Raises `PackError` for a pack that is lazy, steered or compiled for an unknown place;
    `PackError` for a pack of another model.
    """
    token_ids = _tokenised(pack, text, session, compiled_for)
    history = (*pack.history, Edit("rebuild", *_difference(pack.text, text)))
    return _compiled(pack, text, token_ids, session, Edits(history=history))


def overwrite(
    pack: KnowledgePack, old: str, new: str, session: Session, *, compiled_for: CompiledFor | None = None
) -> KnowledgePack:
    """`pack` with the KV of the tokens of `old` replaced by that of `new`. The KV behind it is moved and kept.

    An approximation, for experiments and for reasoning models (Models Take Notes at Prefill, arXiv 2606.17107): what
    stands behind has seen the old value, which may win. `Usage.approximate_tokens` counts such packs. Raises as
    `amend`, `PackError` for a pack with errata, `UnsupportedRequestError` if the model's keys cannot be moved.
    """
    _check(pack)
    if pack.edits.corrections:
        raise PackError(f"The pack {pack.text[:40]!r} has errata, and no field of its own is valid. `squash` it first.")
    text = replaced(pack.text, old, new)
    ids = _tokenised(pack, text, session, compiled_for)
    logger.warning(
        "The pack %r is overwritten in its KV alone: what stands behind has seen the old value, which may win. "
        "`amend` puts an erratum behind it, `rebuild` computes it anew.",
        text[:40],
    )
    start = len(pack.prefix)
    head = common_length(pack.token_ids, ids)
    tail = common_length(pack.token_ids[head:][::-1], ids[head:][::-1])
    if not head and not tail:
        raise PackError(f"The edit keeps no token of {pack.text[:40]!r}. `rebuild` the pack.")
    # The KV before and behind the field is moved; the field itself is computed between them.
    before, stop, behind = Prompt(pack.prefix, owner=pack.namespace), start + len(ids), len(pack.token_ids) - tail
    parts = ((0, head, start), (behind, len(pack.token_ids), stop - tail))
    spans = tuple(_part(pack, first, last, at) for first, last, at in parts if first < last)
    region = Region(start, stop, "composed", spans, SpliceComposer())
    prompt = replace(before, token_ids=(*before.token_ids, *ids), spans=spans)
    plan = Plan(prompt, (*plan_regions(before), region), wanted=(start, stop))
    kv = pack.kv if ids == pack.token_ids else _computed(session, plan, "compose")
    history = (*pack.history, Edit("overwrite", old, new))
    # Packs with equal text that were made from different packs have different KV, so their fingerprints must differ.
    made_of = blake2b(f"{pack.fingerprint.dtype}\0{pack.text}\0{old}".encode(), digest_size=4).hexdigest()
    return replace(
        pack,
        text=text,
        token_ids=ids,
        kv=kv,
        fingerprint=replace(pack.fingerprint, dtype=f"{pack.fingerprint.dtype}{OVERWRITTEN}{made_of}"),
        provenance=Edits(history=history).written(pack.provenance),
        stored_bytes=0,
    )


def replaced(text: str, old: str, new: str) -> str:
    """`text` with its only `old` replaced by `new`; raises as `amend`."""
    _check_words(old, new)
    start, stop = _find(text, old, new)
    return text[:start] + new + text[stop:]


def _tokenised(pack: KnowledgePack, text: str, session: Session, compiled_for: CompiledFor | None) -> tuple[int, ...]:
    """The tokens of `text` at the place that `pack` was compiled for; raises as `rebuild`."""
    _check(pack)
    if pack.steering is not None:
        raise PackError(f"The pack {pack.text[:40]!r} is steered. Edit the pack it was made from, then steer it again.")
    if pack.is_lazy:
        raise PackError(
            f"The pack {pack.text[:40]!r} is lazy: it has no KV to edit. Load it with its KV (`store.get`), compile it "
            "with `engine.build_pack(pack.text)`, or build one of the new text."
        )
    pack.check(session.fingerprint)
    places: tuple[CompiledFor, ...] = ("user", "system") if compiled_for is None else (compiled_for,)
    for place in places:
        prefix, token_ids = session.template.tokenise_pack(text, place)
        if prefix == pack.prefix:
            return token_ids
    raise PackError(
        f"The pack {pack.text[:40]!r} was compiled for another place than {' or '.join(map(repr, places))}. "
        "Give the `compiled_for` that it was built with."
    )


def _compiled(
    pack: KnowledgePack, text: str, token_ids: tuple[int, ...], session: Session, edits: Edits
) -> KnowledgePack:
    """The pack of `text` at the place of `pack`; the KV of their common first tokens is reused."""
    before, sources = Prompt(pack.prefix, owner=pack.namespace), dict[Span, None]()
    reused = common_length(pack.token_ids, token_ids)
    # The states of recurrent layers are known only at the end of a pack.
    if reused and pack.kv is not None and (not pack.kv.states or reused == len(pack.token_ids)):
        span = _part(pack, 0, reused, len(before))
        before = replace(before, token_ids=before.token_ids + token_ids[:reused], spans=(span,))
        sources[span] = None
    ids = pack.prefix + token_ids
    plan = Plan(replace(before, token_ids=ids), plan_regions(before, sources), wanted=(len(pack.prefix), len(ids)))
    kv = _computed(session, plan)
    provenance = edits.written(pack.provenance)
    return replace(pack, text=text, token_ids=token_ids, kv=kv, provenance=provenance, stored_bytes=0)


def _part(pack: KnowledgePack, first: int, last: int, at: int) -> Span:
    """The tokens `first:last` of a pack, with their KV, at the position `at` of a prompt."""
    ids, prefix = pack.token_ids[first:last], pack.prefix + pack.token_ids[:first]
    part = replace(pack, token_ids=ids, prefix=prefix, kv=pack.kv and pack.kv.slice(first, last))
    return Span(at, at + last - first, PackRef("", part))


def _computed(session: Session, plan: Plan, needed: str = "kv") -> KVTensors:
    """The wanted KV of `plan`; raises `UnsupportedRequestError` for an engine without the capabilities."""
    if not {"kv", needed} <= session.supports:
        raise UnsupportedRequestError(f"{session.name} cannot edit packs. `kp_core.load_engine(model)` can.")
    [kv] = session.kv([plan])
    return kv


def _squashed(
    pack: KnowledgePack, text: str, edits: Edits, session: Session, compiled_for: CompiledFor | None
) -> KnowledgePack:
    token_ids = _tokenised(pack, text, session, compiled_for)
    history = (*edits.history, Edit("squash", "", ""))
    return _compiled(pack, text, token_ids, session, Edits(edits.root, edits.errata, history=history))


def _check(pack: KnowledgePack) -> None:
    """Raise `PackError` for what is no pack, such as its handle."""
    if not isinstance(pack, KnowledgePack):
        raise PackError(f"Got {type(pack).__name__}; expected a pack: `store.get(handle)`.")


def _base(pack: KnowledgePack) -> str:
    """The text of a pack without its errata."""
    _check(pack)
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
    _check_words(old, new)
    text = _applied(base, existing)
    try:
        start, stop = _find(text, old, new)
    except PackError:
        # `old` may be the original text of a corrected field.
        originals = [entry for entry in existing if base[entry.start : entry.stop] == old]
        if len(originals) != 1:
            raise
        return [entry for entry in existing if entry is not originals[0]], replace(originals[0], new=new)
    places, shift = {}, 0
    for entry in sorted(existing, key=lambda entry: entry.start):
        places[entry] = (entry.start + shift, entry.start + shift + len(entry.new))
        shift += _grown(entry)
    # The new correction includes the rest of the earlier ones that it overlaps.
    touched = [entry for entry in existing if places[entry][0] < stop and places[entry][1] > start]
    low = min([start, *(places[entry][0] for entry in touched)])
    high = max([stop, *(places[entry][1] for entry in touched)])
    new = text[low:start] + new + text[stop:high]
    first, last = (at - sum(_grown(entry) for entry in existing if places[entry][1] <= at) for at in (low, high))
    return [entry for entry in existing if entry not in touched], Correction(first, last, new, "")


def _grown(each: Correction) -> int:
    """Characters by which a correction lengthens the text."""
    return len(each.new) - (each.stop - each.start)


def _line(base: str, each: Correction, others: Sequence[Correction]) -> str:
    """The line of the erratum: the corrected sentence, and the old text that it replaces."""
    text = _applied(base, [*others, each])
    start = each.start + sum(_grown(other) for other in others if other.start < each.start)
    before, after = text[:start], text[start + len(each.new) :]
    # The sentence around the field.
    head, end = _END.split(before[-_LONGEST:])[-1] if before else "", _END.search(after)
    tail = after[: end.start() if end else None][:_LONGEST].rstrip()
    return _WORDING.format(old=base[each.start : each.stop], sentence=f"{head}{each.new}{tail}")


def _check_words(old: object, new: object) -> None:
    """Raise `PackError` unless both are texts that are not blank."""
    for name, value in (("old", old), ("new", new)):
        if not isinstance(value, str) or not value.strip():
            raise PackError(
                f"Got {name}={value!r}; expected words. To take a statement out, `rebuild` the pack from a text "
                "without it."
            )


def _find(text: str, statement: str, replacement: str) -> tuple[int, int]:
    """Start and stop of `statement` in `text`, in characters; it must match whole words.

    Raises `PackError` unless it occurs exactly once, and if it is equal to `replacement`.
    """
    if statement == replacement:
        raise PackError(f"Got {statement!r} as the old and as the new text; expected another text.")
    before, behind = (r"\b" if edge.isalnum() else "" for edge in (statement[0], statement[-1]))
    places = [match.span() for match in re.finditer(f"{before}{re.escape(statement)}{behind}", text)]
    if len(places) == 1:
        return places[0]
    if not places:
        closest = difflib.get_close_matches(statement, [*_END.split(text), *text.split()], n=1, cutoff=0.4)
        hint = f"Nearest to it is {closest[0]!r}." if closest else f"It begins {text[: 2 * _SHOWN]!r}."
        raise PackError(f"The pack does not say {statement!r}; expected a part of its text, letter by letter. {hint}")
    excerpts = " and ".join(repr(text[max(start - _SHOWN, 0) : stop + _SHOWN]) for start, stop in places[:2])
    raise PackError(
        f"The pack says {statement!r} {len(places)} times: in {excerpts}. Give more of the text around the "
        "one you mean."
    )


def _difference(text: str, other: str) -> tuple[str, str]:
    """The differing part of each text, from the first to the last word that differs."""
    words, other_words = re.split(r"(\s+)", text), re.split(r"(\s+)", other)
    head = common_length(words, other_words)
    tail = common_length(words[head:][::-1], other_words[head:][::-1])
    return "".join(words[head : len(words) - tail]), "".join(other_words[head : len(other_words) - tail])
