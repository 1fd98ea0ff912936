"""Answers from the packs that a question looks at, and leaves the others out."""

from __future__ import annotations

import json
import logging
import re
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from kp_core import KnowledgePack, Plan, Region
from kp_core.bundled import cache_directory
from kp_core.errors import ModelError, OptionError
from kp_core.packs.blobs import replace_file
from kp_core.packs.view import PackRef, PackView, Segment
from kp_core.plan.composer import Arrangement, Host
from kp_core.progress import bar_of
from kp_core.prompt.conversation import GAP, Turn
from kp_methods.calibration import MeasuredComposer, blob_key, calibrations_of
from kp_methods.splice import SpliceComposer

logger = logging.getLogger(__name__)

_HEADS = 4
_REMEMBERED = 512
_QUERY_CHARACTERS = 600  # The end of a longer question says what is asked.
_LED = 0.55
"""Weight, averaged over the retrieval heads, from which on a pack counts as being about the words that were found."""
_NAMED = 0.5
"""Share of the best pack's weight from which on a question counts as naming another pack, too."""
_NO_HEADS = "no retrieval heads of this model were found"
_WORDS = re.compile(r"\w+(?:['\u2019-]\w+)*")
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
_PROBES = (
    ("The key of room {name} hangs in the {value}.", "Where does the key of room {} hang?",
     ("114", "237", "352", "468"), ("kitchen", "hall", "cellar", "office")),
    ("{name} found work at a {value}.", "Where does {} work?",
     ("Amelia Stone", "Beatrice Hill", "Clara Wood", "Diana Field"), ("bank", "farm", "school", "theatre")),
)  # fmt: skip
"""A text about several things, a question about one of them, the things, and what is said of each."""


@dataclass(frozen=True)
class SelectComposer(MeasuredComposer):
    """Selects packs by the model's attention, and composes these exactly.

    Some attention heads of a model look up what a question names (*retrieval heads*, arXiv 2404.15574). One pass of the
    question over the stored KV of all packs shows how much these heads attend to each. Of packs that stand side by
    side, the one with most attention is sent, and at most `packs` in all:

    - The sentence that was found may have words that the question does not have. If the heads find these in another
      pack, it is sent behind the first, and so on: such a chain ends beside the question.
    - Packs with at least half as much attention as the first are sent before it, as the question may name them, too;
      and whatever their attention, until `least` packs are sent.

    The answer is that of the text of these packs, token for token; nothing of the others is in it, so questions about
    all packs (how many, summarise) need `exact`. Where it cannot choose, all packs are sent, or as many of the first as
    fit; `Usage.choice` and a warning say so.

    Raises `OptionError` for numbers below 1, and for `least` above `packs`.
    """

    packs: int = 2
    least: int = 1

    needs = "attention"

    def __post_init__(self) -> None:
        for name, what in (("packs", "the most packs to read"), ("least", "how many packs to read at least")):
            number = getattr(self, name)
            if not (isinstance(number, int | float) and number >= 1 and float(number).is_integer()):
                raise OptionError(f"Got {name}={number!r}; expected {what}, from 1 on.")
            object.__setattr__(self, name, int(number))
        if self.least > self.packs:
            raise OptionError(f"Got least={self.least} above packs={self.packs}, the most to read; raise packs.")

    @property
    def key(self) -> str:
        """Method and numbers."""
        return f"select:packs={self.packs}" + (f",least={self.least}" if self.least > 1 else "")

    @property
    def most(self) -> int:
        """As `packs`."""
        return self.packs

    def arrange(self, turns: Sequence[Turn], host: Host) -> Arrangement:
        """The turns with the packs that the model's attention selects."""
        return selector_of(host).selected(turns, self, host)


class _CannotChooseError(Exception):
    """Packs that cannot be compared; the message is the reason."""


@dataclass(frozen=True)
class Group:
    """Group `number` of packs side by side, each once, in turn `turn`; `place` identifies everything before them."""

    number: int
    turn: int
    place: Hashable
    packs: tuple[PackRef, ...]


class Selector:
    """Chooses which of the packs that stand side by side in a message are sent, for the model of `host`.

    `heads` are the model's retrieval heads, `(layer, head)`, if they are known. What was chosen at a place for a
    question is remembered, so a conversation keeps its earlier choices, and with them its KV.
    """

    def __init__(self, host: Host, heads: Sequence[tuple[int, int]] = ()) -> None:
        self._host = host
        self._found = ([layer for layer, _ in heads], [head for _, head in heads]) if heads else None
        self._chosen = OrderedDict[Hashable, list[int]]()
        self._lock = threading.Lock()
        self._shares: list[Tensor] = []
        self._searching, self._is_queued = threading.Lock(), False

    def selected(self, turns: Sequence[Turn], composer: SelectComposer, host: Host) -> Arrangement:
        """The turns with the packs that `composer` selects.

        Packs that have no KV yet, that are steered, corrected or of another model cannot be compared, so they and their
        neighbours are all sent, from the first on, as far as they fit.
        """
        groups, kept, whole, why = list[Group](), list[list[PackRef]](), list[list[PackRef]](), ""

        def choose(group: Group) -> Sequence[PackRef]:
            nonlocal why
            groups.append(group)
            kept.append([*group.packs])
            if len(group.packs) > 1:
                try:
                    kept[-1] = self._best(group, query_of(turns, group.turn), composer, host.view)
                except _CannotChooseError as error:
                    why = str(error)
                    whole.append(kept[-1])
            return kept[-1]

        chosen, fits = arranged(turns, choose), True
        if not any(len(group.packs) > 1 for group in groups):
            self._prepare()
        while whole and (excess := host.excess(chosen)) > 0 and len(longest := max(whole, key=len)) > 1:
            fits = False
            while excess > 0 and len(longest) > 1:
                excess -= max(1, len(longest.pop().pack.token_ids))
            chosen = arranged(turns, lambda group: kept[group.number])
        unread = sum(len(group.packs) for group in groups) - sum(map(len, kept))
        choice = f"{composer.key} could not choose, because {why}: " if why else ""
        if why and (host.place, why) not in host.cautioned:
            host.cautioned.add((host.place, why))
            logger.warning("%sall packs are sent, or the first ones that fit.", choice)
        choice += ("all are sent" if fits else "the first ones that fit are sent") if why else ""
        return Arrangement(chosen, composer, unread, choice)

    def attention(self, packs: Sequence[PackRef], query: str, view: PackView | None) -> list[float]:
        """How much `query` attends to each pack, 0 to 1; empty where they cannot be compared.

        It is the largest weight of each retrieval head, averaged over heads.
        """
        try:
            return [_most(weights) for weights in self._weights(packs, query[-_QUERY_CHARACTERS:], view)]
        except _CannotChooseError:
            return []

    def _prepare(self) -> None:
        """Find the heads while no request is answered, so that the first choice need not wait for them."""
        if self._found is None and not self._is_queued and {"attention", "kv"} <= self._host.engine.supports:
            with suppress(ModelError):  # A request that chooses finds them.
                self._host.when_idle(self._search)
            self._is_queued = True

    def _best(self, group: Group, query: str, composer: SelectComposer, view: PackView | None) -> list[PackRef]:
        key = group.place, tuple(pack.handle for pack in group.packs), query, composer.key
        with self._lock:
            places = self._chosen.pop(key, None)
        if places is None:
            places = self._looked_up(group.packs, query, composer, view)
        with self._lock:
            self._chosen[key] = places
            if len(self._chosen) > _REMEMBERED:
                self._chosen.popitem(last=False)
        return [group.packs[at] for at in places]

    def _looked_up(
        self, packs: Sequence[PackRef], query: str, composer: SelectComposer, view: PackView | None
    ) -> list[int]:
        """The places of the packs to send, in this order. Raises `_CannotChooseError`.

        What was found may name what the question does not, and another pack may be about that. Such a chain ends beside
        the question. Packs that the question names nearly as much as the best one stand before it.
        """
        seen = self._weights(packs, query, view)
        asked = [_most(weights) for weights in seen]
        chain, rest, known = [max(range(len(packs)), key=asked.__getitem__)], list(range(len(packs))), query
        while len(chain) < min(composer.packs, len(packs)):
            rest.remove(chain[-1])
            sentence = self._sentence(packs[chain[-1]].pack, seen[chain[-1]], known)
            if not (words := _new_words(sentence, known)):
                break
            looks = self._weights([packs[at] for at in rest], words, view)
            led = dict(zip(rest, map(_most, looks), strict=True))
            best = max(rest, key=lambda at: asked[at] + led[at])
            if led[best] < _LED:
                break
            chain.append(best)
            seen[best] = seen[best] + looks[rest.index(best)]
            known = f"{known} {sentence}"
        others = sorted(set(range(len(packs))) - set(chain), key=asked.__getitem__, reverse=True)
        named = [
            at
            for number, at in enumerate(others[: composer.packs - len(chain)], len(chain) + 1)
            if number <= composer.least or asked[at] >= _NAMED * asked[chain[0]]
        ]
        return named[::-1] + chain

    def _sentence(self, pack: KnowledgePack, weights: Tensor, known: str) -> str:
        """The sentence of a pack with most attention (`weights`, `(heads, tokens)`) and most words of `known`."""
        sentences, stops = _ENDS.split(pack.text), [end.end() for end in _ENDS.finditer(pack.text)]
        # Where each token ends, about: a token alone may be decoded to fewer or more characters.
        sizes = list(accumulate(len(self._host.engine.tokenizer.decode([token])) for token in pack.token_ids))
        shares, words = [0.0] * len(sentences), _lower_words(known)
        for size, weight in zip(sizes, weights.sum(dim=0).tolist(), strict=True):
            shares[bisect_left(stops, size * len(pack.text) / max(1, sizes[-1]))] += weight
        ranks = [share * (1 + len(words & _lower_words(text))) for share, text in zip(shares, sentences, strict=True)]
        return sentences[ranks.index(max(ranks))][:_QUERY_CHARACTERS]

    def _weights(self, packs: Sequence[PackRef], query: str, view: PackView | None) -> list[Tensor]:
        """How much the retrieval heads attend to the tokens of each pack, `(heads, tokens)` each."""
        layers, heads = self._heads()
        weights = self._by_head(packs, query, view, max(layers) + 1)
        try:
            return [each[layers, heads] for each in weights]
        except IndexError:  # What was stored is not of this model.
            self._found = None
            return self._weights(packs, query, view)

    def _by_head(
        self, packs: Sequence[PackRef], query: str, view: PackView | None, layers: int | None = None
    ) -> list[Tensor]:
        """How much `query` attends to the tokens of each pack, `(layers, heads, tokens)` each.

        Raises `_CannotChooseError`.
        """
        # A pack of memory ends its line itself.
        parts: list[Segment] = [part for pack in packs for part in (pack, "" if pack.memory else GAP)]
        prompt = self._host.template.render_turns([Turn("user").with_segments([*parts, query])])
        if len(prompt) > self._host.engine.max_positions and len(packs) > 1:
            # More packs than the model has positions: each half is looked at by itself.
            at = len(packs) // 2
            first, second = (self._by_head(half, query, view, layers) for half in (packs[:at], packs[at:]))
            return first + second
        for span in prompt.spans:
            pack = span.pack
            if pack.steering is not None or pack.edits.errata:
                raise _CannotChooseError("some packs are steered or corrected")
            if not (pack.kv or pack.stored_bytes) or pack.fingerprint != self._host.model:
                raise _CannotChooseError("some packs are not compiled for this model")
            if pack.token_ids != prompt.token_ids[span.start : span.stop]:
                raise _CannotChooseError("some packs have other tokens beside others")
        if len(prompt.spans) != len(packs):
            raise _CannotChooseError("the template does not show all packs")
        start, stop = prompt.spans[0].start, prompt.spans[-1].stop
        region = Region(start, stop, "composed", prompt.spans, SpliceComposer())
        weights = self._host.attention(Plan(prompt, (Region(0, start, "computed"), region), packs=view), layers)
        if weights is None:
            raise _CannotChooseError("some packs are not compiled for this model")
        return [weights[..., span.start - start : span.stop - start] for span in prompt.spans]

    def _heads(self) -> tuple[list[int], list[int]]:
        """Layers and heads of the retrieval heads. Waits until they are found."""
        while (found := self._found) is None:
            for _ in bar_of("Finding the retrieval heads of this model", len(_PROBES), "text", self._search()):
                pass
        return found

    def _search(self) -> Iterator[None]:
        """Find the retrieval heads, one text a step; threads share the work."""
        while self._found is None:
            with self._searching:
                if self._found is None:
                    self._next_text()
            yield

    def _next_text(self) -> None:
        """Ask about the next text of our own; after the last, keep the heads with most weight on the pack asked for."""
        text, question, names, values = _PROBES[len(self._shares)]
        texts = [text.format(name=name, value=value) for name, value in zip(names, values, strict=True)]
        packs = [PackRef(str(at), pack) for at, pack in enumerate(self._host.build(texts))]
        shares = []
        for at, name in list(enumerate(names))[::2]:
            try:
                by_token = self._by_head(packs, question.format(name), None)
            except _CannotChooseError as error:
                raise _CannotChooseError(_NO_HEADS) from error
            weights = torch.stack([each.amax(dim=-1) for each in by_token], dim=-1)
            shares.append(weights[..., at] / weights.sum(dim=-1))
        self._shares.append(torch.stack(shares))
        if len(self._shares) < len(_PROBES):
            return
        mean = torch.cat(self._shares).mean(dim=0)
        self._shares.clear()
        if not mean.isfinite().all():
            raise _CannotChooseError(_NO_HEADS)
        best = mean.flatten().topk(min(_HEADS, mean.numel())).indices
        layers, heads = (best // mean.shape[1]).tolist(), (best % mean.shape[1]).tolist()
        with suppress(OSError):
            replace_file(_file_of(self._host), [json.dumps([*zip(layers, heads, strict=True)]).encode()])
        self._found = layers, heads


def selector_of(host: Host) -> Selector:
    """The selector for the model of `host`."""

    def make() -> Selector:
        if (shipped := calibrations_of(host).of(None)) and shipped.heads:
            return Selector(host, shipped.heads)
        with suppress(OSError, ValueError, TypeError):
            return Selector(host, [(int(layer), int(head)) for layer, head in json.loads(_file_of(host).read_bytes())])
        return Selector(host)

    return host.remembered(Selector, make)


def _file_of(host: Host) -> Path:
    """Where the retrieval heads of the model of `host` are kept."""
    return cache_directory() / blob_key(repr(_PROBES), host.model.identity)


def arranged(turns: Sequence[Turn], choose: Callable[[Group], Sequence[PackRef]]) -> tuple[Turn, ...]:
    """`turns` with the packs that `choose` takes of each group, in its order. The others are not sent."""
    arranged = list[Turn]()
    place = number = 0
    for at, turn in enumerate(turns):
        segments, done = list[Segment](), 0
        for start, stop in runs(turn.segments):
            segments += turn.segments[done:start]
            run, done = turn.segments[start:stop], stop
            packs = {segment.handle: segment for segment in run if isinstance(segment, PackRef)}
            kept = choose(Group(number, at, hash((place, turn.role, *map(_name, segments))), tuple(packs.values())))
            number += 1
            if [pack.handle for pack in kept] == [*packs]:
                segments += run
            else:
                between = "" if isinstance(run[1], PackRef) else run[1]
                segments += [part for pack in kept for part in (between, pack)][1:]
        arranged.append(turn.with_segments((*segments, *turn.segments[done:])))
        place = hash((place, turn.role, *map(_name, arranged[-1].segments)))
    return tuple(arranged)


def runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """The ranges `start:stop` of segments in which packs alternate with the same text, or with none.

    Two packs count only if the text between them has no letters or digits, because any sentence may separate two packs
    that are no list.
    """
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(segments):
        stop = at + 1
        while isinstance(segments[at], PackRef) and stop < len(segments) and isinstance(segments[stop], PackRef):
            stop += 1
        if stop > at + 1:
            ranges.append((at, stop))
        elif isinstance(segments[at], PackRef):
            separator = segments[at + 1] if at + 2 < len(segments) else None
            while stop + 1 < len(segments) and segments[stop] == separator and isinstance(segments[stop + 1], PackRef):
                stop += 2
            count = (stop - at + 1) // 2
            if count > 2 or (count > 1 and not any(char.isalnum() for char in str(separator))):
                ranges.append((at, stop))
            else:
                stop = at + 1
        at = stop
    return ranges


def _name(segment: Segment) -> str:
    return segment.handle if isinstance(segment, PackRef) else segment


def query_of(turns: Sequence[Turn], at: int) -> str:
    """What the packs of turn `at` are read for.

    The words of a user message itself; for packs elsewhere, the latest user message, with the tool call that the packs
    answer.
    """
    words = _words(turns[at])
    if turns[at].role == "user" and any(char.isalnum() for char in words):
        return words[-_QUERY_CHARACTERS:]
    before = turns[:at] if turns[at].role == "tool" else turns
    asked = [_words(turn) for turn in before if turn.role == "user"][-1:]
    if turns[at].role == "tool":
        calls = next((turn.tool_calls for turn in reversed(before) if turn.tool_calls), ())
        asked += [json.dumps(call.get("arguments", call), ensure_ascii=False) for call in calls]
    return "\n".join(asked)[-_QUERY_CHARACTERS:]


def _words(turn: Turn) -> str:
    """The text of a turn without its packs, and without the white space around them."""
    texts = (segment.strip() for segment in turn.segments if isinstance(segment, str))
    return "\n".join(filter(None, texts))


def _most(weights: Tensor) -> float:
    """The largest weight of each head, `(heads, tokens)`, averaged over heads."""
    return float(weights.amax(dim=-1).mean())


def _lower_words(text: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(text)}


def _new_words(sentence: str, known: str) -> str:
    """The words of `sentence` that `known` does not have, in their order."""
    old = _lower_words(known)
    return " ".join(word for word in _WORDS.findall(sentence) if word.lower() not in old)
