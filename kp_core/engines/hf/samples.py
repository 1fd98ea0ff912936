"""Draws samples for the training of soft tokens: a question over documents, each of which is a packet."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from kp_core.engines.session import Session
from kp_core.errors import ShortTextError, WrapperError
from kp_core.packs.handle import Handle, mint
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.view import Packs

__all__ = ["Documents", "PacketTraining", "Sample", "Samples"]

Documents = Sequence[tuple[str, str]]
"""Title (may be empty) and text of each document."""

_QUESTIONS = (
    "What is said about {}?",
    "Tell me about {}.",
    "Answer the question with a few words, using the facts.\nQuestion: Who or what is {}?",
    "Summarise in one sentence what the texts above say about {}.",
    "Repeat what the text about {} says.",
)
_NEXT = "Which sentence follows in the texts above?\n{}"
_SHARE_OF_NEXT, _SHARE_OF_OWN, _SHARE_OF_ALL = 0.3, 0.5, 0.25
_TRIES = 50
_SECRET = b"packs in training"


@dataclass(frozen=True)
class PacketTraining:
    """Settings of the training of soft tokens. All of them affect the result.

    Raises `WrapperError` for a value out of range.
    """

    soft: int = 8
    """Tokens of the header, and of the trailer."""
    steps: int = 1000
    batch: int = 2
    """Samples per step."""
    rate: float = 0.05
    """Initial step size of Adam, in standard deviations of the model's embeddings; it falls to 0 as a cosine."""
    documents: tuple[int, int] = (1, 10)
    """Fewest and most documents of a sample."""
    tokens: tuple[int, int] = (128, 1024)
    """Least and greatest length of documents in tokens: shorter ones are left out, longer ones cut."""
    answer: int = 24
    """Most tokens of an answer."""
    every: int = 50
    """Steps between two evaluations on held-out documents."""
    patience: int = 6
    """Evaluations in a row without an improvement that end the training."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("soft", "steps", "batch", "answer", "every", "patience"):
            if getattr(self, name) < 1:
                raise WrapperError(f"Got {name}={getattr(self, name)}; expected at least 1.")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise WrapperError(f"Got rate={self.rate}; expected a finite number > 0.")
        for name in ("documents", "tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise WrapperError(f"Got {name}={low}-{high}; expected two numbers from 1 on, the smaller one first.")

    def to_dict(self) -> dict[str, Any]:
        """The settings as in a training record."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PacketTraining:
        """The inverse of `to_dict`."""
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**settings)


@dataclass(frozen=True)
class Sample:
    """One question over documents: in the canonical `prompt`, `packets` begin at position `begin`.

    Each packet has the tokens of a document and of the blanks behind it, and is compiled behind the first `prefix`
    tokens of the prompt. `behind` are the tokens after the last packet. If `answer` is `None`, the teacher writes it.
    """

    prompt: tuple[int, ...]
    prefix: int
    begin: int
    packets: tuple[tuple[int, ...], ...]
    behind: tuple[int, ...]
    answer: tuple[int, ...] | None


class Samples:
    """Draws samples from documents, some of which are held out.

    The number of a sample determines it, whatever was drawn before. Raises `WrapperError` for too few documents.
    """

    def __init__(self, session: Session, texts: Documents, settings: PacketTraining) -> None:
        self._session, self._settings = session, settings
        most, tokens = settings.documents[1], settings.tokens
        self._positions = session.max_positions - settings.answer
        encode, decode = session.tokenizer.encode, session.tokenizer.decode
        documents: list[tuple[str, str]] = []
        for title, text in dict.fromkeys(texts):
            ids = encode(text, add_special_tokens=False)
            if len(ids) >= tokens[0]:
                documents.append((title, text.strip() if len(ids) <= tokens[1] else decode(ids[: tokens[1]]).strip()))
        if len(documents) < 2 * most:
            raise WrapperError(
                f"Got {len(documents)} different documents of at least {tokens[0]} tokens (of {len(texts)}); expected "
                f"at least {2 * most}, as a sample has up to {most} and as many are held out. Give more documents, or "
                "lower --documents or --tokens."
            )
        random.Random(settings.seed).shuffle(documents)  # noqa: S311 - not cryptography
        held_count = max(most, min(len(documents) // 10, 200))
        self._pools = {"held": documents[:held_count], "train": documents[held_count:]}
        self._store = _Memory()
        self._pack = lru_cache(4096)(self._build)

    @property
    def held(self) -> Documents:
        """The held-out documents, which no training sample contains."""
        return self._pools["held"]

    def draw(self, kind: str, number: int, count: int | None = None) -> Sample:
        """Draw sample `number` for `"train"`, or of the `"held"` out documents; with `count` documents, if given.

        Raises `WrapperError` for too few held-out documents, and if none of 50 attempts fits.
        """
        if count is not None and count > len(self._pools[kind]):
            raise WrapperError(f"Got {len(self._pools[kind])} documents that are held out; expected at least {count}.")
        for attempt in range(_TRIES):
            draw = random.Random(f"{self._settings.seed}/{kind}/{number}/{attempt}")  # noqa: S311 - not cryptography
            sample = self._made(draw, self._pools[kind], count)
            if sample is not None:
                return sample
        raise WrapperError(
            f"None of {_TRIES} samples fits: the tokenizer merges these documents with what stands around them, or "
            f"they are too long for the {self._session.max_positions} positions of the model."
        )

    def _made(self, draw: random.Random, pool: Documents, count: int | None) -> Sample | None:
        chosen = draw.sample(pool, count or draw.randint(*self._settings.documents))
        question, answer = self._asked(draw, *draw.choice(chosen))
        try:
            handles = [self._pack(f"{title}: {text}" if title else text) for title, text in chosen]
        except ShortTextError:
            return None
        view = replace(self._store.view("default"), recognise=False)
        prompt = self._session.template.render("\n\n".join((*map(str, handles), question)), view=view)
        spans, ends = prompt.spans, self._session.template.ends(prompt)
        fits = [span.pack.token_ids == prompt.token_ids[span.start : span.stop] for span in spans]
        if (
            len(spans) < len(chosen)
            or not all(fits)
            or len(prompt) + 2 * self._settings.soft * len(spans) > self._positions
        ):
            return None
        # The first document stands where its pack was compiled. Alone, or in a share of samples, it is a packet too.
        first_packet = 0 if len(spans) == 1 or draw.random() < _SHARE_OF_ALL else 1
        prefix = spans[0].start
        starts = [span.start for span in spans[first_packet:]]
        if list(ends[first_packet:-1]) != starts[1:] or spans[0].pack.prefix.token_ids != prompt.token_ids[:prefix]:
            return None
        ids = prompt.token_ids
        packets = tuple(ids[start:end] for start, end in zip(starts, ends[first_packet:], strict=True))
        return Sample(ids, prefix, starts[0], packets, ids[ends[-1] :], answer)

    def _asked(self, draw: random.Random, title: str, text: str) -> tuple[str, tuple[int, ...] | None]:
        """A question about a document, and the tokens of its answer; `None` if the teacher is to write it."""
        sentences = re.split(r"(?<=[.!?])\s+", text)
        if len(sentences) > 1 and draw.random() < _SHARE_OF_NEXT:
            at = draw.randrange(len(sentences) - 1)
            question, answer = _NEXT.format(sentences[at]), " ".join(sentences[at + 1 :])
        else:
            question, answer = draw.choice(_QUESTIONS).format(title or " ".join(text.split()[:5])), text
        if draw.random() < _SHARE_OF_OWN:
            return question, None
        ids = self._session.tokenizer.encode(answer, add_special_tokens=False)
        return question, tuple(ids[: self._settings.answer]) or None

    def _build(self, text: str) -> Handle:
        return self._store.put(self._session.build_pack(text, lazy=True))


class _Memory(Packs):
    """Pack store in memory."""

    def __init__(self) -> None:
        self._packs: dict[Handle, KnowledgePack] = {}

    def handle(self, text: str, namespace: str) -> Handle:
        return mint(_SECRET, namespace, text)

    def put(self, pack: KnowledgePack) -> Handle:
        handle = self.handle(pack.text, pack.namespace)
        self._packs[handle] = pack
        return handle

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:  # noqa: ARG002
        return self._packs.get(handle)

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:  # noqa: ARG002
        return self._packs[handle]

    def remove(self, handle: Handle) -> None:
        del self._packs[handle]

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._packs)
