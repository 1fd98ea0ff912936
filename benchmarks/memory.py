"""Memory over sessions: right answers, tokens and time to the first token together, on public benchmarks.

`--set locomo` (LoCoMo, Maharana et al. 2024): conversations of many sessions, and questions about what was said. Each
session is a pack; `passages` are sessions cut between turns into at most 300 tokens. `--set personamem` (PersonaMem,
Jiang et al. 2025): sessions in passages of that size, and questions with four options; the answer is the letter that
the model finds most likely, nothing is decoded.

A way to remember is what is read (`none`, the `whole` conversation, the best `sessions` or `passages` by embedding),
how many, and how: as `text` in the prompt, as packs (`exact`), or as packs of which `select` reads those that the
question is about. `--ways` takes others, too, with any composer (`sessions 10 select:packs=1`). `whole` is left out
where it does not fit the model's window. A session is as near to a question as the nearest of its passages.

- `f1` and `em`: token F1, and the share of questions whose answer stands in what was said, with 95 % intervals. On
  PersonaMem `em` is the share of right letters. `found`: the share of questions with a known session of which at least
  one is among those read.
- `sent`, `delivered`, `computed`: tokens a question. `first_s` and `answer_s`: median seconds to the first token and to
  the end, as after a restart: packs on disk, nothing in memory but the system head. Of the first `--timed` questions
  also `cold_s`, with the packs compiled first, and `warm_s`, with what was read in memory (packs and text alike).
- `bytes`: KV on disk a question. `differ`: answers other than those of the same text.

Ways that read more get fewer questions of the same order (`--limit` is that of the cheapest). Below 100 questions those
that read most are left out, so that `--limit 50` takes minutes. With `--json OUT`, each answer is written to OUT with
the ending `.jsonl` when it is done, and the same command goes on there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress
from scipy.stats import binomtest

from benchmarks import common, plots
from benchmarks.answers import read_log
from kp_core import PackStore, Session
from kp_core.banks.embed import SentenceTransformerEmbedder

__all__ = ["COLUMNS", "WAYS", "Memory", "main", "passages", "read_set", "run"]

_ANSWER = 24
"""Tokens of an answer, at most."""
_PASSAGE = 300
"""Tokens of a passage, at most."""
_LETTERS = "abcd"
_CHOOSE = "Answer with the letter of the reply that fits this user best: a, b, c or d."
COLUMNS = (
    *("way", "n", "f1", "f1_low", "f1_high", "em", "em_low", "em_high", "found", "sent", "delivered", "computed"),
    *("first_s", "answer_s", "cold_s", "warm_s", "bytes", "differ"),
)
"""Of every row; `None` where it was not measured."""


class Way(NamedTuple):
    """A way to remember."""

    unit: str
    """`none`, `whole`, `sessions` or `passages`."""
    top: int
    method: str
    """`text`, or a composer."""
    share: float
    """Of the questions of the cheapest way that it gets."""

    @property
    def name(self) -> str:
        """Unit, count and method."""
        return " ".join(filter(None, (self.unit, str(self.top or ""), self.method if self.unit != "none" else "")))


WAYS = {
    "locomo": (
        Way("none", 0, "text", 1),
        Way("sessions", 1, "text", 1),
        Way("sessions", 1, "exact", 1),
        Way("sessions", 3, "text", 1 / 3),
        Way("sessions", 3, "exact", 1 / 3),
        Way("sessions", 5, "text", 2 / 15),
        Way("sessions", 5, "exact", 2 / 15),
        Way("sessions", 10, "select", 1),
        Way("passages", 10, "text", 1 / 3),
        Way("passages", 10, "select", 1),
        Way("whole", 0, "text", 1 / 30),
    ),
    "personamem": tuple(
        Way("passages", count, method, 1) for count in (5, 10) for method in ("text", "exact", "select")
    ),
}
"""Of each set."""
_ALL = {name: [way.name for way in ways] for name, ways in WAYS.items()}
_FEW = 100
_OF_FEW = {
    "locomo": ["none", "sessions 1 text", "sessions 1 exact", "passages 10 text", "passages 10 select"],
    "personamem": ["passages 5 text", "passages 5 exact", "passages 5 select"],
}
"""The ways by default with fewer than `_FEW` questions: minutes, not hours."""


def _ways_of(name: str, wanted: Sequence[str]) -> list[Way]:
    """The ways of that name: one that the set lacks is asked all questions.

    Raises `ValueError` for what names no way.
    """
    known = {way.name: way for way in WAYS[name]}
    others = {each: re.fullmatch(r"(sessions|passages) ([1-9]\d*) (\S+)", each) for each in wanted if each not in known}
    if unknown := [each for each, match in others.items() if match is None]:
        raise ValueError(
            f"got the ways {unknown}; expected of {[*known]}, or others written so, as 'sessions 10 select:packs=1'"
        )
    made = {each: Way(match[1], int(match[2]), match[3], 1) for each, match in others.items() if match}
    return [known.get(each) or made[each] for each in wanted]


@dataclass(frozen=True)
class _Asked:
    """A question to somebody's sessions."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: frozenset[str]
    category: str


class Memory:
    """The sessions of one user or conversation, with their passages by nearness to a question."""

    def __init__(self, sessions: Mapping[str, Sequence[str]], session: Session, embedder: Any) -> None:  # noqa: ANN401
        def tokens(text: str) -> int:
            return len(session.tokenizer.encode(text, add_special_tokens=False))

        self.sessions = {name: "\n".join(turns) for name, turns in sessions.items()}
        cut = [(name, passage) for name, turns in sessions.items() for passage in passages(turns, tokens)]
        self._of = [name for name, _ in cut]
        self._passages = [passage for _, passage in cut]
        self._embedder, self._vectors = embedder, embedder.embed(self._passages)
        self.packs = dict[str, tuple[str, int]]()
        """The handle and bytes of KV of each text that was compiled; only what is timed is compiled again."""

    def best(self, way: Way, question: str) -> tuple[list[str], set[str]]:
        """The texts that a way reads, the nearest first (the whole in its order), and the sessions that they are of."""
        if way.unit in ("none", "whole"):
            kept = self.sessions if way.unit == "whole" else {}
            return list(kept.values()), set(kept)
        nearest = np.argsort(-(self._vectors @ self._embedder.embed_query(question)), kind="stable")
        if way.unit == "passages":
            chosen = nearest[: way.top]
            return [self._passages[at] for at in chosen], {self._of[at] for at in chosen}
        names = list(dict.fromkeys(self._of[at] for at in nearest))[: way.top]
        return [self.sessions[name] for name in names], set(names)


def passages(turns: Sequence[str], tokens: Any) -> Iterator[str]:  # noqa: ANN401
    """The turns of a session in passages of at most `_PASSAGE` tokens, each below the first line, which says when.

    A turn that is longer is cut between words.
    """
    first, held = turns[0], list[str]()
    for turn in _pieces(turns[1:], tokens):
        if held and tokens("\n".join((first, *held, turn))) > _PASSAGE:
            yield "\n".join((first, *held))
            held = []
        held.append(turn)
    yield "\n".join((first, *held))


def _pieces(turns: Iterable[str], tokens: Any) -> Iterator[str]:  # noqa: ANN401
    for turn in turns:
        words = turn.split(" ")
        parts = math.ceil(tokens(turn) / (_PASSAGE - 60))
        size = math.ceil(len(words) / max(parts, 1))
        for start in range(0, len(words), max(size, 1)):
            yield " ".join(words[start : start + size])


def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = json.load(file)
    return rows


def _locomo_turns(row: Mapping[str, Any]) -> list[str]:
    """The day of a session, then its turns; a picture is its caption."""
    turns = [f"On {time.strftime('%d %B %Y', time.strptime(row['timestamp'][:10], '%Y-%m-%d'))}:"]
    for turn in json.loads(row["content"]):
        shown = f" (shows {turn['blip_caption']})" if turn.get("blip_caption") else ""
        turns.append(f"{turn['speaker']}: {turn['text']}{shown}")
    return turns


def _personamem_turns(row: Mapping[str, Any]) -> list[str]:
    """The persona's first line, then the turns."""
    turns = [line.strip() for line in row["content"].split("\n") if line.strip()]
    return ["A conversation:", *turns]


def read_set(name: str, folder: Path) -> tuple[dict[str, dict[str, list[str]]], dict[str, list[_Asked]]]:
    """Sessions and questions of a set, both by user or conversation."""
    stem, turns_of = ("locomo", _locomo_turns) if name == "locomo" else ("personamem32k", _personamem_turns)
    sessions: dict[str, dict[str, list[str]]] = {}
    for row in _read(folder / f"{stem}_documents.json.gz"):
        sessions.setdefault(row["user_id"], {})[row["id"]] = turns_of(row)
    asked: dict[str, list[_Asked]] = {}
    for row in _read(folder / f"{stem}_queries.json.gz"):
        gold = frozenset(row["gold_ids"] if name == "locomo" else ())
        category = row["meta"]["category" if name == "locomo" else "question_type"]
        one = _Asked(row["id"], row["query"], tuple(map(str, row["gold_answers"])), gold, category)
        asked.setdefault(row["user_id"], []).append(one)
    return sessions, asked


def _ask(session: Session, prompt: str, letters: Sequence[int], **options: Any) -> tuple[str, Any, float]:  # noqa: ANN401
    """What is answered (a letter of the likeliest token, where `letters` are asked for), its usage and seconds."""
    start = time.perf_counter()
    answer = session.generate(prompt, max_tokens=1 if letters else _ANSWER, **options)
    seconds = time.perf_counter() - start
    if letters and answer.logits is not None:
        return _LETTERS[int(answer.logits[list(letters)].argmax())], answer.usage, seconds
    return answer.text, answer.usage, seconds


def _measured(  # noqa: PLR0913
    session: Session,
    store: PackStore,
    way: Way,
    memory: Memory,
    one: _Asked,
    letters: Sequence[int],
    *,
    timed: bool,
) -> dict[str, Any] | None:
    """The record of a question and a way; `None` where the prompt does not fit the model's window."""
    texts, read = memory.best(way, one.question)
    documents: list[str] = texts
    options: dict[str, Any] = {}
    record: dict[str, Any] = {"found": bool(read & one.gold) if one.gold else None, "bytes": 0}
    if way.method != "text":
        start = time.perf_counter()
        missing = [text for text in texts if timed or text not in memory.packs]
        packs = list(session.build_packs(missing, progress=False))
        record["cold_s"] = time.perf_counter() - start
        memory.packs |= {pack.text: (str(store.put(pack)), pack.kv.nbytes if pack.kv else 0) for pack in packs}
        documents = [memory.packs[text][0] for text in texts]
        record["bytes"] = sum(memory.packs[text][1] for text in texts)
        # As another process finds them.
        view = PackStore(store.path).view("default")
        options = {"view": view, "composer": way.method, "keep": "never"}

    def prompt(question: str) -> str:
        if letters:
            return "\n\n".join((*documents, question, _CHOOSE))
        return common.prompt(documents, question)

    asked = prompt(one.question)
    if way.unit == "whole":
        length = len(session.tokenizer.encode(asked))
        if length + _ANSWER + 64 > session.max_positions:
            return None
    common.reset(session)
    said, usage, seconds = _ask(session, asked, letters, **options)
    record |= {
        "said": said,
        "first_s": usage.ttft_s,
        "answer_s": seconds,
        "sent": usage.prompt_tokens,
        "delivered": usage.pack_tokens,
        "computed": usage.computed_tokens,
    }
    record["cold_s"] = record.get("cold_s", 0.0) + usage.ttft_s
    if letters:
        record["em"] = record["f1"] = float(said == one.answers[-1])
    else:
        line = common.first_line(said)
        record["f1"] = max(common.f1(line, answer) for answer in one.answers)
        record["em"] = float(any(common.contains(line, answer) for answer in one.answers))
    if timed:
        common.reset(session)
        session.generate(prompt("What was said last?"), max_tokens=1, **options)
        record["warm_s"] = session.generate(asked, max_tokens=1, **options).usage.ttft_s
    return record


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows. Writes each record to the file beside `--json`, and takes from there what is done."""
    session = common.load_engine(arguments)
    embedder = SentenceTransformerEmbedder()
    sessions, asked = read_set(arguments.set, arguments.data)
    order = [(user, one) for user in asked for one in asked[user]]
    random.Random(arguments.seed).shuffle(order)  # noqa: S311
    order = order[: arguments.limit]
    letters = [] if arguments.set == "locomo" else [_token(session, letter) for letter in _LETTERS]
    ways = arguments.ways
    wanted = {way.name: math.ceil(len(order) * way.share) for way in ways}
    log = arguments.json and arguments.json.with_suffix(".jsonl")
    cell = json.dumps([arguments.set, arguments.dtype, str(arguments.model), arguments.seed, arguments.timed])
    done = {key: line["record"] for key, line in read_log(log).get(cell, {}).items()} if log else {}
    with Progress() as progress:
        task = progress.add_task(arguments.set, total=sum(wanted.values()))
        # One user after the other: no more packs lie on disk than those of one.
        for user in dict.fromkeys(user for user, _ in order):
            mine = [(at, one) for at, (whose, one) in enumerate(order) if whose == user]
            todo = [
                (way, at, one)
                for way in ways
                for at, one in mine
                if at < wanted[way.name] and _key(way, one) not in done
            ]
            progress.advance(task, sum(at < wanted[way.name] for way in ways for at, _ in mine) - len(todo))
            if not todo:
                continue
            memory = Memory(sessions[user], session, embedder)
            with common.scratch(session) as folder:
                store = PackStore(folder)
                for way, at, one in todo:
                    timed = at < arguments.timed
                    record = _measured(session, store, way, memory, one, letters, timed=timed)
                    done[_key(way, one)] = record
                    if log:
                        with log.open("a", encoding="utf-8") as lines:
                            lines.write(json.dumps({"cell": cell, "number": _key(way, one), "record": record}) + "\n")
                    progress.advance(task)
    figures: dict[str, Any] = {"set": arguments.set, "dtype": arguments.dtype, "rows": [], "categories": []}
    for way in ways:
        records = [(one, done.get(_key(way, one))) for _, one in order[: wanted[way.name]]]
        measured = [(one, record) for one, record in records if record]
        if not measured:
            continue
        text = {one.id: done.get(_key(way._replace(method="text"), one)) for one, _ in measured}
        figures["rows"].append({"way": way.name} | _row([record for _, record in measured]) | _differ(measured, text))
        for category in sorted({one.category for one, _ in measured}):
            row = _row([record for one, record in measured if one.category == category])
            figures["categories"].append({"way": way.name, "category": category} | row)
    common.write_json(arguments.json, figures)
    return figures


def _key(way: Way, one: _Asked) -> str:
    return f"{way.name}: {one.id}"


def _token(session: Session, letter: str) -> int:
    (token,) = session.tokenizer.encode(letter, add_special_tokens=False)
    return int(token)


def _row(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a way from its records."""
    n = len(records)
    f1 = [record["f1"] for record in records]
    spread = 1.96 * statistics.pstdev(f1) / math.sqrt(n)
    interval = binomtest(int(sum(record["em"] for record in records)), n).proportion_ci(method="wilson")
    known = [record["found"] for record in records if record["found"] is not None]
    timed = [record for record in records if "warm_s" in record]
    row: dict[str, Any] = dict.fromkeys(COLUMNS[1:])
    row |= {"n": n, "f1": common.mean(f1), "f1_low": max(0.0, common.mean(f1) - spread)}
    row |= {"f1_high": min(1.0, common.mean(f1) + spread), "em": common.mean(record["em"] for record in records)}
    row |= {"em_low": float(interval.low), "em_high": float(interval.high)}
    row |= {"found": common.mean(known) if known else None}
    row |= {
        name: common.mean(record[name] for record in records) for name in ("sent", "delivered", "computed", "bytes")
    }
    row |= {name: statistics.median(record[name] for record in records) for name in ("first_s", "answer_s")}
    if timed:
        row |= {name: statistics.median(record[name] for record in timed) for name in ("cold_s", "warm_s")}
    return row


def _differ(
    measured: Sequence[tuple[_Asked, Mapping[str, Any]]], text: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, int]:
    """How many answers differ from those of the same text, where that was asked, too."""
    pairs = [(record["said"], twin["said"]) for one, record in measured if (twin := text[one.id])]
    return {"differ": sum(mine != theirs for mine, theirs in pairs)} if pairs else {}


def draw(folder: Path, figures: Mapping[str, Any]) -> None:
    """Right answers over seconds to the first token, after a restart."""
    rows = [row for row in figures["rows"] if row["way"] != "none"]
    name = f"memory-{figures['set']}"
    labels = ("seconds to the first token, after a restart", "right answers")
    points = {row["way"]: (row["first_s"], row["em"], row["em_low"], row["em_high"]) for row in rows}
    plots.points(folder, name, points, labels)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, show, draw and write."""
    parser = common.argument_parser(__doc__, "memory")
    parser.set_defaults(limit=300)
    parser.add_argument("--set", default="locomo", choices=WAYS, help="default: %(default)s")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="as in the table; default: all, or the short ones")
    parser.add_argument("--timed", type=int, default=5, metavar="N", help="questions also asked cold and warm")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of questions")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw right answers over time")
    arguments = parser.parse_args(argv)
    try:
        named = arguments.ways or (_OF_FEW if arguments.limit < _FEW else _ALL)[arguments.set]
        arguments.ways = _ways_of(arguments.set, named)
    except ValueError as error:
        parser.error(str(error))
    if arguments.limit < 1:
        parser.error(f"got --limit {arguments.limit}; expected at least 1")
    if not arguments.data.is_dir():
        parser.error(f"there is no folder {arguments.data}; set KP_DATA to the folder that holds `memory`")
    figures = run(arguments)
    about = f"{arguments.set}, {arguments.dtype}, seed {arguments.seed}"
    answers = ("way", "n", "f1", "f1_low", "f1_high", "em", "em_low", "em_high", "found", "differ")
    costs = ("way", "sent", "delivered", "computed", "first_s", "answer_s", "cold_s", "warm_s", "bytes")
    by_category = ("way", "category", "n", "f1", "em", "em_low", "em_high", "found")
    for title, columns, rows in (
        ("Answers", answers, figures["rows"]),
        ("Cost", costs, figures["rows"]),
        ("By category", by_category, figures["categories"]),
    ):
        cells = [["-" if row.get(name) is None else row[name] for name in columns] for row in rows]
        common.show_table(f"{title} ({about})", columns, cells)
    if arguments.plots:
        draw(arguments.plots, figures)
    return figures


if __name__ == "__main__":
    main()
