"""Which entries of KV at rest fit along a prompt."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from kp_core.packs.entry import Entry
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.packs.pack import Prefix
from kp_core.plan.plan import Plan

__all__ = ["entries_along"]

_GAP_TOKENS = 64  # Most tokens between two packs that are kept together with the second one.
_BEGINS = 8  # First tokens of a part that belong to its key.


def entries_along(
    plan: Plan, model: ModelFingerprint, heads: Sequence[Prefix], namespace: str | None, *, lazy: bool
) -> Iterator[tuple[tuple[int, int], Entry]]:
    """Yield the entries that KV of `plan` may be read from and kept in, each with its tokens `start:stop` there.

    Each pack has one that is not composed or read from its own KV, if a handle brought it or one before it. A short
    text between two packs belongs to the second one. KV behind words of the conversation is kept in `namespace`, or
    not at all; words are all text but that of packs and of the template, whose prefixes are `heads`, and white space.
    With `lazy`, packs without stored KV are kept, too, which are else computed at each use by choice. A pack between
    soft tokens has the entry that it is compiled to there.
    """
    prompt, spans = plan.prompt, plan.prompt.spans
    # The template wrote the first tokens, or they are the prefix that a pack here was compiled for.
    prefixes = (*heads, *(span.pack.prefix for span in spans))
    known = max((len(prefix) for prefix in prefixes if prompt.token_ids[: len(prefix)] == prefix), default=0)
    has_words, said = bool(spans) and known < spans[0].start, spans[0].chars[0] if spans else 0
    handles, hasher, digested = list[str](), blake2b(digest_size=16), 0
    for region in plan.regions:
        last_stop = region.start
        for span in (span for span in spans if region.start <= span.start < region.stop):
            pack, has_handle = span.pack, bool(find_handles(span.handle))
            # A pack without a handle is not in the store, so its text counts as words.
            has_words = has_words or not has_handle or bool(prompt.rendered[said : span.chars[0]].strip())
            said = span.chars[1]
            if has_handle and span.handle not in handles:
                handles.append(span.handle)
            is_joined = handles and digested and span.start - last_stop <= _GAP_TOKENS
            start = last_stop if is_joined else span.start
            hasher.update(_packed(prompt.token_ids[digested:start]))
            digested, last_stop = start, span.stop
            if span.soft and has_handle:
                soft = Entry.of_pack(span.handle, model, pack.prefix, pack.token_ids, span.soft.id)
                yield (span.start, span.stop), soft
            has_own = region.source == "pack" and bool(pack.kv or pack.stored_bytes or not lazy)
            if handles and not region.label and not has_own and (namespace or not has_words):
                owners = frozenset((*handles, namespace) if namespace and has_words else handles)
                # Behind the template alone it is the entry that the pack is compiled to.
                begins = 0 if owners == {span.handle} and start == span.start else _BEGINS
                ids = prompt.token_ids[start : span.stop]
                yield (start, span.stop), Entry(model, start, hasher.hexdigest(), ids, owners, begins=begins)
        if region.label:
            hasher.update(_packed(prompt.token_ids[digested : region.stop]) + f"{region.label}\n".encode())
            digested = region.stop


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)
