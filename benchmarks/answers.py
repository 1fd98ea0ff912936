"""Do composed packs answer as well as their text, and how much sooner? The yardstick for composers.

A question counts when its text answers it right and no knowledge does not (whole words of the normalised answer); with
`--all`, also when its text answers it wrong. Its documents are packs behind one another, in the order `given` or
`shuffled` once more. One row for each of `--sets` (`benchmarks.questions`), number of packs, size, order and composer;
`reversed` is no composer, but the text with its documents in reverse order, and shows how far answers change by that
alone:

- `kept`: share of the questions that exact composition answers right which this composer answers right, too, with its
  95 % interval (Wilson), `low` to `high`; `lost` and `won` count the answers that only exact, or only it, has right.
  `right` are all that it has right.
- `kl`: nats a token by which the composer finds the answer of exact composition less likely than exact does.
- `ttft_s`: median time to the first token of the first `--timed` questions that count, alone, with the packs in the
  store and nothing in memory but the system head; `text_s` that of the plain string, `floor_s` that of another question
  behind the same text in memory; `ratio` is the median of the first to the second, question by question; `computed` are
  the tokens that passed the model before the first token. The other questions are answered eight at once.
- `bytes`: KV of a question's packs. `n`: questions that count; `exact_right`: those of them that exact composition
  answers right; `asked`: all that were tried, at most six for each that is wanted.

With `--json OUT`, each question is written to OUT with the ending `.jsonl` when it is done, and the same command goes
on there. Choose methods and settings by seeds 0 to 9; publish figures of seeds from 100 on, by which nothing was
chosen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any

from rich.progress import Progress
from scipy.stats import binomtest

from benchmarks import common, plots
from benchmarks.questions import SETS, Question, of_file, questions
from kp_core import PackStore, Session
from kp_core.errors import OptionError
from kp_core.plan.composer import composer_of

__all__ = ["COLUMNS", "main", "read_log", "row", "run"]

_REVERSED = "reversed"
_COMPOSERS = ("splice", "select:packs=1", "select", _REVERSED)
_ANSWER = 20
"""Tokens of an answer, at most."""
_MOST_TRIED = 6
_AT_ONCE = 8
COLUMNS = (
    *("set", "packs", "tokens", "order", "composer", "n", "exact_right", "kept", "low", "high", "lost", "won", "kl"),
    *("right", "ttft_s", "text_s", "floor_s", "ratio", "computed", "bytes", "asked"),
)
"""Of every row; `None` where it was not measured."""
_Record = dict[str, Any]
"""What was measured of one question; `counts` says whether it counts, and everything else is missing if not."""


def _measured(  # noqa: PLR0913
    engine: Session,
    store: PackStore,
    question: Question,
    documents: Sequence[str],
    composers: Sequence[str],
    *,
    timed: bool,
    every: bool,
) -> _Record:
    """What the text, exact composition and each of `composers` say of a question, and how long they take if `timed`."""
    reset = common.reset if timed else lambda _: None
    text = common.prompt(documents, question.asked)
    reset(engine)
    read, known = (engine.generate(each, max_tokens=_ANSWER) for each in (text, common.prompt((), question.asked)))
    is_right = common.contains(read.text, question.answer)
    if common.contains(known.text, question.answer) or not (is_right or every):
        return {"counts": False}
    packs = list(engine.build_packs(documents, progress=False))
    handles = [store.put(pack) for pack in packs]
    prompt = common.prompt(handles, question.asked)
    options: dict[str, Any] = {"view": store.view("default"), "keep": "never"}
    record: _Record = {"counts": True, "composers": {}, "bytes": sum(pack.kv.nbytes for pack in packs if pack.kv)}
    if timed:
        reset(engine)
        record["text_s"] = engine.generate(text, max_tokens=1).usage.ttft_s
        record["floor_s"] = engine.generate(common.prompt(documents, "What comes last?"), max_tokens=1).usage.ttft_s
    exact_text, exact_loss = "", 0.0
    for composer in ("exact", *composers):
        reset(engine)
        asked = common.prompt(handles[::-1], question.asked) if composer == _REVERSED else prompt
        method = "exact" if composer == _REVERSED else composer
        answer = engine.generate(asked, composer=method, max_tokens=_ANSWER, **options)
        exact_text = exact_text or answer.text
        loss = math.log(common.perplexity(engine, asked, exact_text, composer=method, **options))
        exact_loss = loss if composer == "exact" else exact_loss
        record["composers"][composer] = {
            "right": common.contains(answer.text, question.answer),
            "kl": loss - exact_loss,
            **({"ttft_s": answer.usage.ttft_s, "computed": answer.usage.computed_tokens} if timed else {}),
        }
    return record


def _cell(
    measure: Callable[[int, Question, bool], _Record],
    found: Iterator[Question],
    done: Mapping[int, _Record],
    wanted: int,
    timed: int,
) -> Iterator[tuple[int, _Record]]:
    """Records of questions and their numbers, until `wanted` of them count; the first `timed` that do one by one."""
    counted, numbered = 0, islice(enumerate(found), wanted * _MOST_TRIED)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        while counted < wanted and (batch := list(islice(numbered, 1 if counted < timed else _AT_ONCE))):
            is_timed = counted < timed
            records = threads.map(lambda pair: done.get(pair[0]) or measure(pair[0], pair[1], is_timed), batch)  # noqa: B023
            for (number, _), record in zip(batch, records, strict=True):
                counted += record["counts"]
                yield number, record


def row(records: Sequence[_Record], composer: str) -> dict[str, Any]:
    """The row of a composer, without its cell, from the records of the cell that count."""
    mine = [record["composers"][composer] for record in records]
    exact, right = ([record["composers"][name]["right"] for record in records] for name in ("exact", composer))
    both = sum(a and b for a, b in zip(exact, right, strict=True))
    interval = binomtest(both, sum(exact)).proportion_ci(method="wilson") if any(exact) else None
    timed = [(record, record["composers"][composer]) for record in records if "text_s" in record]
    times: dict[str, Any] = {}
    if timed:
        times = {
            "ttft_s": statistics.median(one["ttft_s"] for _, one in timed),
            "text_s": statistics.median(record["text_s"] for record, _ in timed),
            "floor_s": statistics.median(record["floor_s"] for record, _ in timed),
            "ratio": statistics.median(one["ttft_s"] / record["text_s"] for record, one in timed),
            "computed": common.mean(one["computed"] for _, one in timed),
        }
    return {
        "composer": composer,
        "n": len(records),
        "exact_right": sum(exact),
        "kept": both / sum(exact) if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "lost": sum(exact) - both,
        "won": sum(right) - both,
        "right": sum(right),
        "kl": common.mean(one["kl"] for one in mine),
        "bytes": common.mean(record["bytes"] for record in records),
        **times,
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows. Writes each record to the file beside `--json`, and takes from there what is done."""
    engine = common.load_engine(arguments)
    log = arguments.json and arguments.json.with_suffix(".jsonl")
    earlier = read_log(log) if log else {}
    figures: dict[str, Any] = {"dtype": arguments.dtype, "seed": arguments.seed, "rows": []}
    of_own = [(str(arguments.data), 0, 0)] if arguments.data else []
    cells = of_own or list(product(arguments.sets, arguments.packs, arguments.tokens))
    composers = [each for each in arguments.composers if each != "exact"]

    def encode(text: str) -> Sequence[int]:
        return list(engine.tokenizer.encode(text, add_special_tokens=False))

    with Progress() as progress, tempfile.TemporaryDirectory() as folder:
        store = PackStore(folder)
        for (kind, packs, tokens), order in product(cells, arguments.orders):
            about = {"set": kind, "packs": packs, "tokens": tokens, "order": order}
            asked_for = arguments.dtype, arguments.seed, arguments.timed, composers, arguments.all
            key = json.dumps([*about.values(), *asked_for])
            found = of_file(arguments.data) if of_own else questions(kind, packs, tokens, encode, arguments.seed)

            def measure(number: int, question: Question, is_timed: bool, order: str = order) -> _Record:  # noqa: FBT001
                documents = list(question.documents)
                if order == "shuffled":
                    random.Random(number).shuffle(documents)  # noqa: S311
                return _measured(engine, store, question, documents, composers, timed=is_timed, every=arguments.all)

            task = progress.add_task(", ".join(map(str, about.values())), total=arguments.limit)
            records: list[_Record] = []
            asked = 0
            done = earlier.get(key, {})
            for number, record in _cell(measure, found, done, arguments.limit, arguments.timed):
                if log and number not in done:
                    with log.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps({"cell": key, "number": number, **record}) + "\n")
                asked += 1
                records += [record] if record["counts"] else []
                progress.update(task, completed=min(len(records), arguments.limit))
            for composer in ("exact", *composers) if records else ():
                about_row = about | row(records, composer) | {"asked": asked}
                figures["rows"].append(dict.fromkeys(COLUMNS) | about_row)
            common.write_json(arguments.json, figures)
        engine.when_idle(lambda: None).result()
    return figures


def read_log(log: Path) -> dict[str, dict[Any, _Record]]:
    """Records of earlier runs by cell and number; a line that was cut off is left out."""
    log.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[Any, _Record]] = {}
    if log.exists() and not log.read_text(encoding="utf-8").endswith("\n"):
        with log.open("a", encoding="utf-8") as lines:
            lines.write("\n")
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found.setdefault(record["cell"], {})[record["number"]] = record
    return found


def draw(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Two pictures for each set: answers kept and divergence, by number and size of packs, in the first order."""
    for kind in dict.fromkeys(each["set"] for each in rows):
        mine = [each for each in rows if each["set"] == kind and each["order"] == rows[0]["order"]]
        cells = list(dict.fromkeys(f"{each['packs']} of {each['tokens']}" for each in mine))
        names = [name for name in dict.fromkeys(each["composer"] for each in mine) if name != "exact"]
        for what, label in (("kept", "right answers of exact kept"), ("kl", "nats a token from exact")):
            series = {name: [each[what] or 0.0 for each in mine if each["composer"] == name] for name in names}
            plots.bars(folder, f"answers-{Path(kind).stem}-{what}", cells, series, label)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, show, draw and write."""
    parser = common.argument_parser(__doc__, "")
    parser.set_defaults(data=None, limit=200)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--packs", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--tokens", type=int, nargs="+", default=[30, 130, 300], help="of a pack, about")
    parser.add_argument("--orders", nargs="+", default=["given"], choices=("given", "shuffled"))
    parser.add_argument("--composers", nargs="+", default=_COMPOSERS, metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--timed", type=int, default=20, metavar="N", help="questions asked alone; default: %(default)s"
    )
    parser.add_argument("--all", action="store_true", help="count questions that their text answers wrong, too")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the questions; default: %(default)s")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw kept answers and divergence")
    arguments = parser.parse_args(argv)
    if min(*arguments.packs, *arguments.tokens, arguments.limit) < 1 or arguments.timed < 0:
        parser.error("expected at least 1 pack, token and question, and no fewer than 0 timed ones")
    if arguments.data and not arguments.data.is_file():
        parser.error(f"there is no file {arguments.data}; expected JSON lines with question, answer and passages")
    if not arguments.data and {"hops", "hotpot"} & {*arguments.sets} and min(arguments.packs) < 2:
        parser.error("a question of hops or hotpot needs two facts; expected --packs from 2 on")
    try:
        for composer in arguments.composers:
            if composer != _REVERSED:
                composer_of(composer)
    except OptionError as error:
        parser.error(str(error))
    figures = run(arguments)
    shown = ("packs", "tokens", "composer", "n", "exact_right", "right", "kept", "low", "high", "lost", "won", "kl")
    for title, columns in (
        ("Answers", shown),
        ("Time", ("packs", "tokens", "order", "composer", "ttft_s", "text_s", "floor_s", "ratio", "computed", "bytes")),
    ):
        rows = [
            [each["set"], *("-" if each[name] is None else each[name] for name in columns)] for each in figures["rows"]
        ]
        common.show_table(f"{title} ({arguments.dtype}, seed {arguments.seed})", ("set", *columns), rows)
    if arguments.plots:
        draw(arguments.plots, figures["rows"])
    return figures


if __name__ == "__main__":
    main()
