"""Which entries of KV at rest fit along a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TypeAlias

from kp_core.packs.entry import Entry, packed_ids
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.packs.pack import Prefix
from kp_core.plan.plan import Plan

_GAP_TOKENS = 64  # Most tokens between two packs that are kept together with the second one.
_BEGINS = 8  # First tokens of a part that belong to its key.
_BEGINNING, _WORDS = 64, 16  # Least tokens of a beginning of a conversation, and of each part of words in it.

_Along: TypeAlias = Iterator[tuple[tuple[int, int], Entry, bool]]


def entries_along(  # noqa: C901, PLR0913, PLR0915 - one walk along the prompt
    plan: Plan,
    model: ModelFingerprint,
    heads: Sequence[Prefix],
    namespace: str | None,
    has: Callable[[Entry], int],
    until: int,
    *,
    lazy: bool,
) -> _Along:
    """Yield the entries that KV of `plan` may be read from or kept in: its tokens `start:stop` there, the entry, and
    whether it is stored. `has` returns of how many tokens of an entry there is KV.

    Each pack has one that is not composed or read from its own KV, if a handle brought it or one before it. A short
    text between two packs belongs to the second one. KV behind words of the conversation is kept in `namespace`, or
    not at all; words are all text but that of packs and of the template, whose prefixes are `heads`, and white space.
    With `lazy`, packs without stored KV are kept, too, which are else computed at each use by choice. A pack between
    soft tokens has the entry that it is compiled to there.

    The words themselves are a tree at rest: where a prompt leaves an entry, another one begins. Those up to the token
    `until` are to be kept, if that is a beginning of at least 64 tokens.
    """
    prompt, spans, token_ids = plan.prompt, plan.prompt.spans, plan.prompt.token_ids
    # The template wrote the first tokens, or they are the prefix that a pack here was compiled for.
    prefixes = (*heads, *(span.pack.prefix for span in spans))
    known = max((len(prefix) for prefix in prefixes if token_ids[: len(prefix)] == prefix), default=0)
    has_words, said = bool(spans) and known < spans[0].start, spans[0].chars[0] if spans else 0
    handles, hasher, digested, is_first = list[str](), blake2b(digest_size=16), 0, True
    head = next(iter(prompt.breaks), 0)  # System message and tools are an entry of their own.

    def before(at: int) -> str:
        nonlocal digested
        hasher.update(packed_ids(token_ids[digested:at]))
        digested = at
        return hasher.hexdigest()

    def words(at: int, stop: int) -> _Along:
        as_text = (span for span in prompt.as_text if span.start < stop and find_handles(span.handle))
        owners = frozenset((*handles, *(span.handle for span in as_text), *filter(None, [namespace])))
        while namespace and stop - at >= _WORDS and stop >= _BEGINNING:
            entry = Entry(model, at, before(at), token_ids[at:stop], owners, begins=_WORDS)
            if shared := has(entry):
                # The last token of a prompt is computed, for the logits behind it.
                yield (at, min(at + shared, len(token_ids) - 1)), entry, True
                at += shared
            elif stop > until:
                stop = until
            else:
                end = head if max(at, _BEGINNING - 1) < head <= stop - _WORDS else stop
                yield (at, end), replace(entry, token_ids=token_ids[at:end]), False
                at = end

    for region in plan.regions:
        last_stop = region.start
        for span in (span for span in spans if region.start <= span.start < region.stop):
            pack, has_handle = span.pack, bool(find_handles(span.handle))
            # A pack without a handle is not in the store, so its text counts as words.
            has_words = has_words or not has_handle or bool(prompt.rendered[said : span.chars[0]].strip())
            said = span.chars[1]
            is_joined = (handles or has_handle) and not is_first and span.start - last_stop <= _GAP_TOKENS
            if not is_joined and not region.label:
                yield from words(last_stop, span.start)
            if has_handle and span.handle not in handles:
                handles.append(span.handle)
            start, is_first = last_stop if is_joined else span.start, False
            prefix, last_stop = before(start), span.stop
            if span.soft and has_handle:
                soft = Entry.of_pack(span.handle, model, pack.prefix, pack.token_ids, span.soft.id)
                yield (span.start, span.stop), soft, True  # It is compiled at its first use and kept then.
            has_own = region.source == "pack" and bool(pack.kv or pack.stored_bytes or not lazy)
            if handles and not region.label and not has_own and (namespace or not has_words):
                owners = frozenset((*handles, namespace) if namespace and has_words else handles)
                # Behind the template alone it is the entry that the pack is compiled to.
                begins = 0 if owners == {span.handle} and start == span.start else _BEGINS
                entry = Entry(model, start, prefix, token_ids[start : span.stop], owners, begins=begins)
                shared = has(entry)
                yield (start, start + shared if shared else span.stop), entry, bool(shared)
        if region.label:
            hasher.update(packed_ids(token_ids[digested : region.stop]) + f"{region.label}\n".encode())
            digested, is_first = region.stop, False
        else:
            yield from words(last_stop, region.stop)
