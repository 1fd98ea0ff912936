"""Measures composers by right answers, keeps the result beside the packs, and chooses a composer by it."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from kp_core import Generation, PackStore, PackView, Session
from kp_core.errors import KnowledgePackError, OptionError, PackError
from kp_core.plan.composer import Composer, ExactComposer, Host, composer_of
from kp_core.progress import bar_of

logger = logging.getLogger(__name__)

COMPOSERS = ("select:packs=1", "select", "splice")
"""What is measured by default."""
KEPT, LOW = 0.95, 0.9
"""Least share of the text's right answers, and of its lower end, that a composer must have to be chosen."""
FEWEST = 20
"""Questions without which nothing is said of a composer."""
INSTRUCTION = "Answer the question with a few words, using the facts."
"""Stands before a question that is measured, and before those of `kp ask`."""
SHIPPED = Path(__file__).parent / "calibrations"
"""Calibrations that come with the package, a JSON file for each model."""

_WORDS = re.compile(r"\w+")
_ARTICLES = {"a", "an", "the"}
_COUNTS = ("questions", "right", "text_right")
_Record: TypeAlias = tuple[int, bool, dict[str, tuple[bool, float]]]
"""Most tokens of a pack of a question, whether the text answers it right, whether each composer does, and how long its
first token takes as a share of the text's."""


@dataclass(frozen=True)
class CalibrationQuestion:
    """A question over several passages, of which each becomes a pack.

    `answer` is right where its words stand in what was said; without one, the model's own answer from text is right.
    Questions of one `kind` are judged by themselves: *one fact*, *two facts*.
    """

    question: str
    passages: tuple[str, ...]
    answer: str = ""
    kind: str = ""


@dataclass(frozen=True)
class CalibrationRow:
    """How `composer` answered `questions` of one kind, with `packs` packs each, of at most `tokens` tokens."""

    composer: str
    kind: str
    packs: int
    tokens: int
    questions: int
    text_right: int
    """Questions that the model answers right from the plain text of all packs."""
    lost: int
    """Questions that only the text answers right."""
    won: int
    """Questions that only the composer answers right."""
    ratio: float
    """Median of the time to first token, divided by the text's, with nothing of packs and question in memory."""

    @property
    def right(self) -> int:
        """Questions that it answers right."""
        return self.text_right - self.lost + self.won

    @property
    def kept(self) -> float:
        """Right answers as a share of the text's; NaN where the text has none right."""
        return self.right / self.text_right if self.text_right else math.nan

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval of `kept`, from the paired difference (Agresti and Min, 2005)."""
        won, lost, n = self.won + 0.5, self.lost + 0.5, self.questions + 2
        error = 1.96 * math.sqrt(won + lost - (won - lost) ** 2 / n) / n
        return 1 + ((won - lost) / n - error) * self.questions / self.text_right if self.text_right else math.nan


@dataclass(frozen=True)
class Calibration:
    """What was measured of composers with one model."""

    model: str
    """Identity of the model."""
    rows: tuple[CalibrationRow, ...]
    heads: tuple[tuple[int, int], ...] = ()
    """The model's retrieval heads, `(layer, head)`, if they are known (`SelectComposer`)."""

    @property
    def sizes(self) -> dict[int, int]:
        """The numbers of packs that were measured, each with the most tokens of a pack in questions of every kind."""
        longest: dict[int, dict[str, int]] = defaultdict(dict)
        for row in self.rows:
            longest[row.packs][row.kind] = max(row.tokens, longest[row.packs].get(row.kind, 0))
        return {packs: min(longest[packs].values()) for packs in sorted(longest)}

    def rows_of(self, composer: str, packs: int, tokens: int) -> list[CalibrationRow]:
        """For each kind of question, the nearest row of `composer` that covers such packs; empty if a kind has none."""
        covering = {kind: list[CalibrationRow]() for kind in dict.fromkeys(row.kind for row in self.rows)}
        for row in self.rows:
            if row.composer == composer and packs <= row.packs and tokens <= row.tokens:
                covering[row.kind].append(row)
        if not all(covering.values()):
            return []
        return [min(rows, key=lambda row: (row.packs, row.tokens)) for rows in covering.values()]

    def to_json(self) -> str:
        """The text that `of_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of_json(cls, text: str) -> Calibration:
        """The calibration in `text`; raises `ValueError` or `TypeError` for anything else."""
        stored = json.loads(text)
        if not isinstance(stored, dict) or not isinstance(stored.get("model"), str):
            raise ValueError("no calibration")  # noqa: TRY004 - as for JSON that cannot be read
        rows = []
        for made in stored.get("rows") or ():
            row = CalibrationRow(**made)
            numbers = (row.packs, row.tokens, row.questions, row.text_right, row.lost, row.won, row.ratio)
            if not all(math.isfinite(number) and number >= 0 for number in numbers) or not row.questions:
                raise ValueError(f"a row with the numbers {numbers}")
            composer_of(row.composer)
            rows.append(row)
        heads = tuple((int(layer), int(head)) for layer, head in stored.get("heads", ()))
        return cls(stored["model"], tuple(rows), heads)

    def table(self) -> str:
        """The rows, one a line, and what the columns are."""
        lines = ["kind        packs tokens composer               right  text  kept   low  ratio"]
        lines += [
            f"{row.kind[:11]:11} {row.packs:5} {row.tokens:6} {row.composer[:22]:22} {row.right:5} "
            f"{row.text_right:5} {row.kept:5.2f} {row.low:5.2f} {row.ratio:6.2f}"
            for row in self.rows
        ]
        legend = (
            "right, text: right answers of the composer and of the text; kept: the first by the second, low: the least "
            "of its 95 % interval; ratio: first-token time by the text's."
        )
        return "\n".join([*lines, legend])


class Calibrations:
    """The calibrations of one model: of a store, else the one that comes with the package. Each is read once.

    `supports` are the capabilities of the engine that runs it.
    """

    def __init__(self, model: str, supports: Iterable[str]) -> None:
        self._model, self._key, self._supports = model, blob_key("calibration", model), frozenset(supports)
        self._known: dict[str, Calibration | None] = {}
        self._lock = threading.Lock()

    def of(self, view: PackView | None) -> Calibration | None:
        """The calibration for requests with `view`, or `None`."""
        blobs = None if view is None else view.source.blobs
        with self._lock:
            if str(blobs) not in self._known:
                stored = None
                if blobs is not None:
                    with suppress(FileNotFoundError):
                        stored = self._read(bytes(blobs.read(self._key)), f"{self._key} of {blobs}")
                self._known[str(blobs)] = stored or self._shipped()
            return self._known[str(blobs)]

    def check_writable(self, view: PackView | None) -> None:
        """Raise `PackError` if no calibration can be stored beside the packs of `view`."""
        blobs, trial = None if view is None else view.source.blobs, f"{self._key}.{os.urandom(8).hex()}"
        if blobs is not None:
            try:
                blobs.write(trial, [b"{}"])
                blobs.delete(trial)
            except OSError as error:
                raise PackError(
                    f"Got a store that cannot be written ({error}); the calibration is stored beside its packs. Give "
                    "one that can, or call `calibrate_composers` without `view`: it returns the calibration."
                ) from error

    def keep(self, calibration: Calibration, view: PackView | None) -> None:
        """Use `calibration` for requests with `view` from now on, and store it beside the packs if that is possible."""
        blobs = None if view is None else view.source.blobs
        if blobs is not None:
            try:
                blobs.write(self._key, [calibration.to_json().encode()])
            except OSError as error:  # It took minutes: the caller gets it anyway.
                logger.warning("The calibration is used by this process, but could not be stored: %s", error)
        with self._lock:
            self._known[str(blobs)] = calibration

    def choice(
        self, groups: Sequence[Sequence[int]], view: PackView | None, kept: float = KEPT, low: float = LOW
    ) -> tuple[Composer, str]:
        """As `chosen`, for `groups` of packs side by side, given by their numbers of tokens.

        The largest group of packs side by side in a message decides, and the longest pack.
        """
        packs = max(map(len, groups), default=0)
        if packs < 2:
            return ExactComposer(), "no packs stand side by side"
        if not (calibration := self.of(view)) or not calibration.rows:
            return ExactComposer(), "nothing was measured with this model: see `kp calibrate`"
        return self.chosen(calibration, packs, max(map(max, groups)), kept, low)

    def chosen(
        self, calibration: Calibration, packs: int, tokens: int, kept: float = KEPT, low: float = LOW
    ) -> tuple[Composer, str]:
        """The fastest composer that this engine runs and that keeps enough of the text's right answers of every kind.

        Exact composition if there is none. Returns the reason, too. `packs` packs stand side by side, the longest of
        `tokens` tokens.
        """
        kept_by, is_measured = list[tuple[int, float, str, CalibrationRow]](), False
        for name in dict.fromkeys(row.composer for row in calibration.rows):
            is_supported = composer_of(name).needs in self._supports
            rows = calibration.rows_of(name, packs, tokens) if is_supported else []
            is_measured |= bool(rows)
            if rows and all(row.kept >= kept and row.low >= low for row in rows):
                ratio, worst = statistics.mean(row.ratio for row in rows), min(rows, key=lambda row: row.low)
                if ratio < 1:
                    kept_by.append((max(row.packs for row in rows), ratio, name, worst))
        if not kept_by:
            found = f"no other keeps {kept:.0%} of the right answers" if is_measured else "nothing was measured"
            return ExactComposer(), f"{found} over {packs} packs of up to {tokens} tokens"
        # Times over another number of packs cannot be compared; the nearest number comes first.
        _, ratio, name, worst = min(kept_by, key=lambda best: best[:2])
        reason = (
            f"it has {worst.kept:.0%} of the text's right answers (at least {worst.low:.0%}; {worst.questions} "
            f"questions over {worst.packs} packs) at {ratio:.2f} of its time to first token"
        )
        return composer_of(name), reason

    def _shipped(self) -> Calibration | None:
        found = (self._read(path.read_bytes(), str(path)) for path in sorted(SHIPPED.glob("*.json")))
        return next(filter(None, found), None)

    def _read(self, stored: bytes, name: str) -> Calibration | None:
        """The calibration in `stored` if it is one of this model; says so where it cannot be read."""
        try:
            calibration = Calibration.of_json(stored.decode())
        except (ValueError, TypeError, KnowledgePackError) as error:
            logger.warning("The calibration %s cannot be read (%s); `kp calibrate` makes a new one.", name, error)
            return None
        return calibration if calibration.model == self._model else None


class MeasuredComposer(Composer):
    """An approximate composer; what users are told of it is what was measured."""

    def caution(self, host: Host) -> str:
        """See `Composer.caution`: empty if it keeps enough of the text's right answers."""
        calibration = calibrations_of(host).of(host.view)
        rows = [row for row in calibration.rows if composer_of(row.composer).key == self.key] if calibration else []
        if not rows:
            return (
                f"Answers with composer {self.key!r} are not those of all packs, and nothing says how good they are on "
                "your data: measure with `kp calibrate`, or in Python with "
                f"`kp_methods.calibrate_composers(engine, questions, [{self.key!r}], view=...)`."
            )
        if (worst := min(rows, key=lambda row: row.kept)).kept >= KEPT:
            return ""
        questions, right, text_right = (sum(getattr(row, name) for row in rows) for name in _COUNTS)
        return (
            f"Answers with composer {self.key!r} are not those of all packs: of {questions} questions {right} were "
            f"answered right, and {text_right} from the text of all. It does worst at {worst.kind!r}, with "
            f"{worst.packs} packs: {worst.right} of {worst.questions} right, {worst.text_right} from text."
        )


def calibrations_of(host: Host) -> Calibrations:
    """What is known of composers with the model of `host`."""
    return host.remembered(Calibrations, lambda: Calibrations(host.model.identity, host.engine.supports))


def blob_key(what: str, model: str) -> str:
    """Where `what` was measured of `model` is stored beside the packs."""
    return f"composers/{blake2b(f'{model} {what}'.encode(), digest_size=16).hexdigest()}.json"


def enough_of(questions: Iterable[CalibrationQuestion]) -> list[CalibrationQuestion]:
    """The questions with at least two passages; raises `OptionError` for fewer than 20."""
    wanted = [question for question in questions if len(question.passages) > 1]
    if len(wanted) < FEWEST:
        raise OptionError(f"Got {len(wanted)} questions with at least two passages; expected {FEWEST} or more.")
    return wanted


def calibrate_composers(  # noqa: PLR0913
    session: Session,
    questions: Iterable[CalibrationQuestion],
    composers: Sequence[str] = COMPOSERS,
    *,
    view: PackView | None = None,
    minutes: float = 10,
    max_tokens: int = 20,
    progress: bool = True,
) -> Calibration:
    """Measure `composers` by the right answers to your questions, against the plain text of the same passages.

    Each question is answered from the text and by each composer, greedily, with nothing in memory but the beginning of
    the chat template. Questions are taken in a mixed order until `minutes` are over, but at least 20. With
    `view=store.view(...)`, the result is stored beside the packs, and `composer="auto"` chooses by it from then on. The
    engine's memory is emptied; packs of the questions are not stored. Raises `OptionError` for fewer than 20 questions
    with at least two passages, and for composers that are not known or exact; `PackError`, before anything is
    measured, if the store of `view` cannot be written.
    """
    wanted = enough_of(questions)
    random.Random(0).shuffle(wanted)  # noqa: S311 - so that a time limit cuts no kind off
    calibrations, resolved = calibrations_of(session.host), {_named(name): composer_of(name) for name in composers}
    if not resolved or any(composer.exact for composer in resolved.values()):
        raise OptionError(f"Got the composers {list(composers)}; expected some that are measured, not exact or auto.")
    calibrations.check_writable(view)  # Before minutes are spent.
    records = defaultdict[tuple[str, int], list[_Record]](list)
    done = 0
    with tempfile.TemporaryDirectory() as folder, bar_of("Questions", len(wanted), "question", shown=progress) as bar:
        store = PackStore(folder)
        place = str(store.view("default").source.blobs)
        # No warning of what is being measured.
        session.host.cautioned.update((place, composer.key) for composer in resolved.values())
        keeping = set(resolved)
        _measured(session, store, wanted[0], resolved, keeping, max_tokens)  # What happens once belongs to no composer.
        began = time.monotonic()
        for question in wanted:
            if done >= FEWEST and time.monotonic() - began > minutes * 60:
                break
            record = _measured(session, store, question, resolved, keeping, max_tokens)
            records[question.kind, len(question.passages)].append(record)
            done += 1
            bar.update()
        session.when_idle(lambda: None).result()
    session.clear_cache()
    calibration = Calibration(session.fingerprint.identity, tuple(_rows(records, resolved)))
    calibrations.keep(calibration, view)
    return calibration


def _named(name: str) -> str:
    """The name with all parameters, unless these are a file, whose digest is in the key."""
    composer = composer_of(name)
    with suppress(OptionError):
        return composer.key if composer_of(composer.key) == composer else name
    return name


def _measured(  # noqa: PLR0913
    session: Session,
    store: PackStore,
    question: CalibrationQuestion,
    composers: Mapping[str, Composer],
    keeping: set[str],
    max_tokens: int,
) -> _Record:
    """Only composers in `keeping` may keep KV; one without soft tokens is taken out of it."""
    packs = list(session.build_packs(question.passages, progress=False))
    handles = [str(store.put(pack)) for pack in packs]

    def ask(parts: Sequence[str], **options: Any) -> Generation:  # noqa: ANN401
        session.clear_cache()
        session.prefill("Hello.")  # As in a process that answered before: the template's beginning is in memory.
        prompt = "\n\n".join((*parts, f"{INSTRUCTION}\nQuestion: {question.question}"))
        return session.generate(prompt, max_tokens=max_tokens, **options)

    text = ask(question.passages)
    expected = question.answer or text.text
    results = dict[str, tuple[bool, float]]()
    for name, composer in composers.items():
        # Packs between soft tokens are compiled once and kept, as packs are.
        keep = "used_twice" if name in keeping else "never"
        answer = ask(handles, composer=composer, view=store.view("default"), keep=keep)
        if not any(span.soft for span in answer.prompt.spans):
            keeping.discard(name)
        results[name] = contains(answer.text, expected), answer.usage.ttft_s / text.usage.ttft_s
    return max(len(pack.token_ids) for pack in packs), contains(text.text, expected), results


def _rows(records: Mapping[tuple[str, int], Sequence[_Record]], composers: Iterable[str]) -> Iterator[CalibrationRow]:
    for ((kind, packs), cell), name in product(sorted(records.items()), composers):
        pairs = [(text, results[name][0]) for _, text, results in cell]
        yield CalibrationRow(
            *(name, kind, packs, max(tokens for tokens, *_ in cell), len(cell)),
            text_right=sum(text for text, _ in pairs),
            lost=sum(text and not mine for text, mine in pairs),
            won=sum(mine and not text for text, mine in pairs),
            ratio=round(statistics.median(results[name][1] for *_, results in cell), 4),
        )


def contains(said: str, expected: str) -> bool:
    """Whether the words of `expected` stand in what was said, one behind the other; case and articles do not count."""
    mine, theirs = (" ".join(word for word in _WORDS.findall(text.lower()) if word not in _ARTICLES)
                    for text in (said, expected))  # fmt: skip
    return f" {theirs} " in f" {mine} "
