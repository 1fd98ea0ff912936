"""Decides which KV of a request the store keeps, and which kept KV a request reads: a prefix tree in the store."""

from __future__ import annotations

import struct
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b

from kp_core.compose import PacketComposer
from kp_core.engines.request import CompiledFor, Request
from kp_core.errors import KnowledgePackError, OptionError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.packs.kept import KeptEntry
from kp_core.packs.store import PackStore
from kp_core.packs.view import PackView
from kp_core.plan import KeptKV, Plan
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.template import ChatTemplate

__all__ = ["Keeper", "Met"]

_GAP_TOKENS = 64  # Most tokens between two packs that are kept together with the second one.
_BEGINS = 8  # First tokens of a part that belong to its key.
_REMEMBERED = 4096


class Met:
    """Says of a key whether it was met before. Remembers the latest 4,096; threads may share it."""

    def __init__(self) -> None:
        self._keys = dict[Hashable, None]()
        self._lock = threading.Lock()

    def __call__(self, key: Hashable, *, learn: bool = True) -> bool:
        """Whether `key` was met before. With `learn`, it is met now."""
        with self._lock:
            was_met = key in self._keys
            if learn and not was_met:
                if len(self._keys) >= _REMEMBERED:
                    del self._keys[next(iter(self._keys))]
                self._keys[key] = None
            return was_met


class Keeper:
    """Decides what KV of one model is kept: by the policy of the request, and by how often its key was met."""

    def __init__(self, template: ChatTemplate, identity: ModelFingerprint) -> None:
        self._template, self._identity = template, identity
        self._met = Met()

    def of(self, plan: Plan, request: Request, *, learn: bool) -> KeptKV | None:
        """The kept KV for `plan`; with `learn`, also the parts that this request must keep.

        `None` if nothing can be kept: without a store that keeps KV, without reuse, with `keep="never"`, or for a
        steered prompt. Raises `OptionError` for a `keep_in` that the view may not read.
        """
        view = request.view
        if view is None or not isinstance(view.source, PackStore):
            return None
        if request.keep_in is not None and request.keep_in not in view.namespaces:
            raise OptionError(f"Got keep_in={request.keep_in!r}; expected one of the view: {sorted(view.namespaces)}.")
        if not plan.reuse or plan.below is not None or request.keep == "never" or not view.source.keep_bytes:
            return None
        kept = KeptKV(
            view.source, frozenset(view.namespaces), dict(self._keys(plan, request, view)), request.keep == "always"
        )
        if learn:
            missing = (part for part in kept.keys if not kept.has(*part))
            kept.wanted = frozenset(part for part in missing if request.keep == "always" or self._met(kept.keys[part]))
        # A wrapped pack is compiled once and kept then, under every policy except `never`.
        kept.keys |= self._wrapped_keys(plan)
        return kept if kept.keys else None

    def _keys(self, plan: Plan, request: Request, view: PackView) -> Iterator[tuple[tuple[int, int], KeptEntry]]:
        """The key of each pack that is not read from its own entry, by the part `start:stop` of the prompt.

        A short text between two packs belongs to the part of the second one.
        """
        prompt, namespace = plan.prompt, _own_words(request, view)
        hasher, behind_words, digested = blake2b(digest_size=16), self._behind_words(prompt), 0
        handles: list[str] = []
        for region in plan.regions:
            span = region.span if region.source == "pack" else None
            # A pack whose KV is not stored is computed each time by choice, so only `keep="always"` keeps it.
            has_entry = span is not None and bool(span.pack.kv or span.pack.stored_bytes or request.keep != "always")
            last_stop = region.start
            for pack_span in prompt.spans:
                if not region.start <= pack_span.start < region.stop:
                    continue
                if find_handles(pack_span.handle) and pack_span.handle not in handles:
                    handles.append(pack_span.handle)
                start = (
                    last_stop
                    if handles and digested and pack_span.start - last_stop <= _GAP_TOKENS
                    else pack_span.start
                )
                hasher.update(_packed(prompt.token_ids[digested:start]))
                digested, last_stop = start, pack_span.stop
                if handles and not region.label and not has_entry and (namespace or not behind_words[pack_span]):
                    key = hasher.hexdigest(), prompt.token_ids[start : pack_span.stop], tuple(handles)
                    words = namespace if behind_words[pack_span] else None
                    yield (start, pack_span.stop), KeptEntry(self._identity, start, *key, words, _BEGINS)
            if region.label:
                hasher.update(_packed(prompt.token_ids[digested : region.stop]) + f"{region.label}\n".encode())
                digested = region.stop

    def _wrapped_keys(self, plan: Plan) -> dict[tuple[int, int], KeptEntry]:
        """The key of each wrapped pack that has a handle. The key of the composer names the wrapper."""
        keys = {}
        for region in plan.regions:
            for span in region.spans if isinstance(region.composer, PacketComposer) else ():
                if region.composer and find_handles(span.handle):
                    pack, composer = span.pack, region.composer.key
                    key = KeptEntry.wrapped(self._identity, composer, pack.prefix, pack.token_ids, span.handle)
                    keys[span.start, span.stop] = key
        return keys

    def _behind_words(self, prompt: Prompt) -> dict[Span, bool]:
        """For each pack, whether words of the conversation precede it.

        The template, other packs and white space do not count as words.
        """
        by_span, has_words = dict[Span, bool](), False
        for at, span in enumerate(prompt.spans):
            if at:
                has_words = has_words or bool(prompt.rendered[prompt.spans[at - 1].chars[1] : span.chars[0]].strip())
            else:
                has_words = self._known(prompt) < span.start
            # A pack without a handle is not in the store, so its text counts as words.
            has_words = has_words or not find_handles(span.handle)
            by_span[span] = has_words
        return by_span

    def _known(self, prompt: Prompt) -> int:
        """How many of the first tokens the template wrote, or are the prefix that a pack here was compiled for."""
        prefixes = [*self._heads, *(span.pack.prefix.token_ids for span in prompt.spans)]
        return max((len(prefix) for prefix in prefixes if prompt.token_ids[: len(prefix)] == prefix), default=0)

    @cached_property
    def _heads(self) -> list[tuple[int, ...]]:
        """The tokens before the first pack of a user message, and of the system message."""
        heads = []
        roles: tuple[CompiledFor, ...] = ("user", "system")
        for role in roles:
            with suppress(KnowledgePackError):  # Not every template has a system message.
                heads.append(self._template.prefix(role).token_ids)
        return heads


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


def _own_words(request: Request, view: PackView) -> str | None:
    """The namespace that keeps KV after words of the conversation; with `None`, such KV is not kept."""
    if request.keep_in is None and len(view.namespaces) == 1:
        return next(iter(view.namespaces))
    return request.keep_in
