"""Decides which KV of a request the store keeps, and which kept KV a request reads: a prefix tree in the store."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b

from kp_core.compose import PacketComposer
from kp_core.engines.request import CompiledFor, Request
from kp_core.errors import KnowledgePackError, OptionError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.packs.kept import KeptEntry, KeptKV
from kp_core.packs.view import PackView
from kp_core.plan import Plan
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.template import ChatTemplate

__all__ = ["Keeper"]

_GAP_TOKENS = 64  # Most tokens between two packs that are kept together with the second one.
_BEGINS = 8  # First tokens of a part that belong to its key.
_REMEMBERED = 4096  # Most keys whose uses are counted.
_PROBE = "The lighthouse keeper counts ships, and writes each of them into a long book."


class Keeper:
    """Decides what KV of one model is kept: by the policy of the request, and by how often its key was met."""

    def __init__(self, template: ChatTemplate, identity: ModelFingerprint) -> None:
        self._template, self._identity = template, identity
        self._met = Counter[KeptEntry]()
        self._counting = threading.Lock()

    def of(self, plan: Plan, request: Request, *, learn: bool) -> KeptKV | None:
        """The kept KV for `plan`; with `learn`, also the parts that this request must keep.

        `None` if nothing can be kept: without a store that keeps KV, without reuse, with `keep="never"`, or for a
        steered prompt. Raises `OptionError` for a `keep_in` that the view may not read.
        """
        view = request.view
        if view is None or (entries := view.source.kept) is None:
            return None
        if request.keep_in is not None and request.keep_in not in view.namespaces:
            raise OptionError(f"Got keep_in={request.keep_in!r}; expected one of the view: {sorted(view.namespaces)}.")
        if not plan.reuse or plan.below is not None or request.keep == "never" or not entries.max_bytes:
            return None
        kept = KeptKV(
            entries, frozenset(view.namespaces), dict(self._keys(plan, request, view)), request.keep == "always"
        )
        if learn:
            missing = (edge for edge in kept.keys if not kept.has(*edge))
            kept.wanted = frozenset(edge for edge in missing if self._again(kept.keys[edge], request.keep))
        # A wrapped pack is compiled once and kept then, under every policy except `never`.
        kept.keys |= self._wrapped_keys(plan)
        return kept if kept.keys else None

    def _again(self, key: KeptEntry, keep: str) -> bool:
        if keep == "always":
            return True
        with self._counting:
            if key not in self._met and len(self._met) >= _REMEMBERED:
                del self._met[next(iter(self._met))]
            self._met[key] += 1
            return self._met[key] > 1

    def _keys(self, plan: Plan, request: Request, view: PackView) -> Iterator[tuple[tuple[int, int], KeptEntry]]:
        """The key of each pack that is not read from its own entry, by the part `start:stop` of the prompt.

        A short text between two packs belongs to the part of the second one.
        """
        prompt, own = plan.prompt, _own_words(request, view)
        before, spoken, digested = blake2b(digest_size=16), self._behind_words(prompt), 0
        packs: list[str] = []
        for region in plan.regions:
            span = region.span if region.source == "pack" else None
            # A pack whose KV is not stored is computed each time by choice, so only `keep="always"` keeps it.
            has_own = span is not None and bool(span.pack.kv or span.pack.stored_bytes or request.keep != "always")
            done = region.start
            for each in prompt.spans:
                if not region.start <= each.start < region.stop:
                    continue
                if find_handles(each.handle) and each.handle not in packs:
                    packs.append(each.handle)
                start = done if packs and digested and each.start - done <= _GAP_TOKENS else each.start
                before.update(_packed(prompt.token_ids[digested:start]))
                digested, done = start, each.stop
                if packs and not region.label and not has_own and (own or not spoken[each]):
                    key = before.hexdigest(), prompt.token_ids[start : each.stop], tuple(packs)
                    words = own if spoken[each] else None
                    yield (start, each.stop), KeptEntry(self._identity, start, *key, words, _BEGINS)
            if region.label:
                before.update(_packed(prompt.token_ids[digested : region.stop]) + f"{region.label}\n".encode())
                digested = region.stop

    def _wrapped_keys(self, plan: Plan) -> dict[tuple[int, int], KeptEntry]:
        """The key of each wrapped pack that has a handle. The key of the composer names the wrapper."""
        found = {}
        for region in plan.regions:
            for span in region.spans if isinstance(region.composer, PacketComposer) else ():
                if region.composer and find_handles(span.handle):
                    pack, composer = span.pack, region.composer.key
                    key = KeptEntry.wrapped(self._identity, composer, pack.prefix, pack.token_ids, span.handle)
                    found[span.start, span.stop] = key
        return found

    def _behind_words(self, prompt: Prompt) -> dict[Span, bool]:
        """For each pack, whether words of the conversation precede it.

        The template, other packs and white space do not count as words.
        """
        found, words = dict[Span, bool](), False
        for at, span in enumerate(prompt.spans):
            if at:
                words = words or bool(prompt.rendered[prompt.spans[at - 1].chars[1] : span.chars[0]].strip())
            else:
                words = self._known(prompt) < span.start
            # A pack without a handle is not in the store, so its text counts as words.
            words = words or not find_handles(span.handle)
            found[span] = words
        return found

    def _known(self, prompt: Prompt) -> int:
        """How many of the first tokens the template wrote, or are the prefix that a pack here was compiled for."""
        prefixes = [*self._heads, *(span.pack.prefix.token_ids for span in prompt.spans)]
        return max((len(each) for each in prefixes if prompt.token_ids[: len(each)] == each), default=0)

    @cached_property
    def _heads(self) -> list[tuple[int, ...]]:
        """The tokens before the first pack of a user message, and of the system message."""
        found = []
        places: tuple[CompiledFor, ...] = ("user", "system")
        for place in places:
            try:
                made = self._template.tokenise_pack(_PROBE, place)
            except KnowledgePackError:  # Not every template has a system message.
                continue
            found.append(made.prompt.token_ids[: made.prompt.spans[0].start])
        return found


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


def _own_words(request: Request, view: PackView) -> str | None:
    """The namespace that keeps KV after words of the conversation; with `None`, such KV is not kept."""
    if request.keep_in is None and len(view.namespaces) == 1:
        return next(iter(view.namespaces))
    return request.keep_in
