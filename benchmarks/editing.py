"""Editing: which edits of a fact change what the model answers, and what each of them costs.

A hundred facts of an invented coast: places of five kinds, of each a number, a name, a date and a rule that is allowed
or not. One of them is edited, in a pack of about `--tokens` tokens that holds its record among others. Methods, as in
*Models Take Notes at Prefill* (arXiv 2606.17107): `overwrite`, the KV of the field alone, asked plainly and with
`reasoning` (the model first repeats what is said); `erratum`, a line behind the pack; `erratum, conversation`, where
the question was answered before from the old pack, and comes again with the new handle; `rebuild`, the reference.

- asked: the facts that the model answers with the old value from the old text, and with the new one after a rebuild.
  changed: the share of these whose answer has the new value and not the old one; old: the other way round.
- kept: the share of the tokens in memory, up to the end of the old pack, that the edit leaves in use.
- computed_share: tokens computed for the edit, by those of the whole pack. ttft_s: seconds from the edit to the first
  token of the answer, median.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common, plots
from kp_core import Generation, KnowledgePack, PackStore, Session
from kp_methods import edit

__all__ = ["KINDS", "Change", "changes", "main", "run"]

KINDS = ("number", "name", "date", "negation")
_METHODS = (
    "overwrite",
    "overwrite, reasoning",
    "erratum",
    "erratum, conversation",
    "rebuild",
    "rebuild, reasoning",
)
_TOKENS, _REASONED = 24, 48  # Most tokens of an answer.


def _words(text: str) -> list[str]:
    return text.split()


_ASK = "Answer the question with a few words, using the text."
_REASON = "First repeat the sentences of the text that answer the question, with every correction, then answer it."
_PLACES = _words(
    "Veyl Harrow Drumlin Selwick Osmere Tarn Quill Brenmouth Ashby Corrin Dunmere Eskell Farrow Gullane Hythe Iveston "
    "Jarrow Kelmere Lorne Maddern Norrick Orwell Penrith Rothbury Stromness"
)
_FIRST = _words("Orla Tam Ana Joss Wenna Dorrin Ketta Perrin Ansa Odo Agnes Bram Cilla Edrith Fenn")
_LAST = _words("Venn Rusk Dorr Tarrable Strake Askew Roon Oake Brill Finnick Umber Lorch Hale Marsh Pike")
_MONTHS = itertools.cycle(_words("January March April May June August September October November December"))
_NUMBERS = [str(number) for number in range(40, 990, 17)]
_NAMES = [f"{first} {last}" for first, last in itertools.product(_FIRST, _LAST)]
_DATES = [
    f"{day} {month} {year}" for day, month, year in zip(range(2, 28), _MONTHS, range(1791, 1921, 5), strict=False)
]
_FIELDS = (  # What is said, and what is asked.
    (
        "The tower of the lighthouse of {} has {} steps.|How many steps has the tower of the lighthouse of {}?",
        "The lighthouse of {} is kept by {}.|Who keeps the lighthouse of {}?",
        "The lighthouse of {} was first lit on {}.|On which day was the lighthouse of {} first lit?",
        "The lighthouse of {} is {}open to visitors.|Is the lighthouse of {} open to visitors? Yes or no?",
    ),
    (
        "The ferry of {} carries {} passengers.|How many passengers does the ferry of {} carry?",
        "The captain of the ferry of {} is {}.|Who is the captain of the ferry of {}?",
        "The ferry of {} was launched on {}.|On which day was the ferry of {} launched?",
        "The ferry of {} is {}running in winter.|Is the ferry of {} running in winter? Yes or no?",
    ),
    (
        "The school of {} has {} pupils.|How many pupils does the school of {} have?",
        "The head teacher of the school of {} is {}.|Who is the head teacher of the school of {}?",
        "The school of {} was founded on {}.|On which day was the school of {} founded?",
        "The school of {} is {}open on Saturdays.|Is the school of {} open on Saturdays? Yes or no?",
    ),
    (
        "The bridge of {} is {} feet long.|How many feet long is the bridge of {}?",
        "The bridge of {} was designed by {}.|Who designed the bridge of {}?",
        "The bridge of {} was opened on {}.|On which day was the bridge of {} opened?",
        "The bridge of {} is {}safe for carts.|Is the bridge of {} safe for carts? Yes or no?",
    ),
    (
        "The museum of {} owns {} paintings.|How many paintings does the museum of {} own?",
        "The director of the museum of {} is {}.|Who is the director of the museum of {}?",
        "The museum of {} received its charter on {}.|On which day did the museum of {} receive its charter?",
        "The museum of {} is {}free of charge.|Is the museum of {} free of charge? Yes or no?",
    ),
)


@dataclass(frozen=True)
class Change:
    """A statement of `text` that is edited, and the question that it answers; `values` are the answers then and now."""

    kind: str
    text: str
    old: str
    new: str
    question: str
    values: tuple[str, str]


def changes(filler: Sequence[str] = ()) -> list[Change]:
    """A hundred edits, four to a record; with `filler`, the record stands in the middle of these sentences."""
    draw = random.Random(0)  # noqa: S311
    made = []
    for number, place in enumerate(_PLACES):
        forms = [field.split("|") for field in _FIELDS[number % len(_FIELDS)]]
        pairs = [draw.sample(values, 2) for values in (_NUMBERS, _NAMES, _DATES)]
        pairs.append(["not ", ""] if number % 2 else ["", "not "])
        said = [form.format(place, old) for (form, _), (old, _) in zip(forms, pairs, strict=True)]
        half = len(filler) // 2
        text = " ".join((*filler[:half], *said, *filler[half:]))
        for kind, (form, question), (old, new), before in zip(KINDS, forms, pairs, said, strict=True):
            asked, values = question.format(place), (old, new)
            if kind == "negation":
                values = ("no", "yes") if old else ("yes", "no")
                old, new = before, form.format(place, new)  # noqa: PLW2901
            made.append(Change(kind, text, old, new, asked, values))
    return made


def _says(said: str, change: Change, *, reasoned: bool = False) -> int:
    """Which of the values an answer has: 0 the old one, 1 the new one, -1 neither, or both."""
    old, new = change.values
    if change.kind == "negation":
        words = common.normalise(said).split()
        spoken = [word for word in words if word in change.values]
        # With reasoning the answer comes last.
        decided = spoken[-reasoned] if spoken else "no" if "not" in words else "yes"
        return int(decided == new) if words else -1
    found = [common.contains(said, old), common.contains(said, new)]
    return -1 if found[0] == found[1] else int(found[1])


@dataclass(frozen=True)
class _Result:
    """What one method made of one change; tokens of the pack that stay, and that were computed, as shares."""

    says: int
    kept: float
    computed: float
    ttft_s: float


class _Bench:
    """One engine and one store, for the changes of one size."""

    def __init__(self, engine: Session, folder: Path) -> None:
        self.engine, self.store = engine, PackStore(folder)

    def ask(self, pack: KnowledgePack, change: Change, how: str, talk: Sequence[dict[str, str]] = ()) -> Generation:
        """The answer from a pack."""
        asked = {"role": "user", "content": f"{self.store.put(pack)}\n\n{how}\n{change.question}"}
        view, tokens = self.store.view("editing"), _REASONED if how == _REASON else _TOKENS
        return self.engine.generate([*talk, asked], view=view, max_tokens=tokens, stop=() if how == _REASON else "\n")

    def results(self, base: KnowledgePack, change: Change) -> dict[str, _Result]:
        """What each method makes of a change; nothing where old text and new text do not decide the answer."""
        engine = self.engine
        before = self.ask(base, change, _ASK)
        now = edit.replaced(change.text, change.old, change.new)
        began = time.perf_counter()
        rebuilt = edit.rebuild(base, now, engine)
        took = time.perf_counter() - began
        after = self.ask(rebuilt, change, _ASK)
        if (_says(before.text, change), _says(after.text, change)) != (0, 1):
            return {}
        size, place = len(rebuilt.token_ids), len(base.prefix)
        same = _common(base.token_ids, rebuilt.token_ids)
        tail = _common(base.token_ids[same:][::-1], rebuilt.token_ids[same:][::-1])

        def result(answer: Generation, stays: int, computed: int, seconds: float, *, reasoned: bool = False) -> _Result:
            kept = (place + stays) / (place + len(base.token_ids))
            says = _says(answer.text, change, reasoned=reasoned)
            return _Result(says, kept, computed / size, seconds + answer.usage.ttft_s)

        made = {"rebuild": result(after, same, size - same, took)}
        thought = self.ask(rebuilt, change, _REASON)
        made["rebuild, reasoning"] = result(thought, same, size - same, took, reasoned=True)
        began = time.perf_counter()
        written = edit.overwrite(base, change.old, change.new, engine)
        took = time.perf_counter() - began
        for name, how in (("overwrite", _ASK), ("overwrite, reasoning", _REASON)):
            answer = self.ask(written, change, how)
            made[name] = result(answer, same + tail, size - same - tail, took, reasoned=how == _REASON)
        began = time.perf_counter()
        amended = edit.amend(base, change.old, change.new, engine, squash_above=math.inf)
        took = time.perf_counter() - began
        stays, line = amended.errata_start, len(amended.token_ids) - amended.errata_start
        made["erratum"] = result(self.ask(amended, change, _ASK), stays, line, took)
        asked = {"role": "user", "content": f"{self.store.put(base)}\n\n{_ASK}\n{change.question}"}
        talk = [asked, {"role": "assistant", "content": before.text}]
        answer = self.ask(amended, change, _ASK, talk)
        made["erratum, conversation"] = result(answer, len(base.token_ids), answer.usage.errata_tokens, 0.0)
        return made


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (at for at, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), min(map(len, (left, right)))
    )


def _rows(
    results: dict[str, list[tuple[str, _Result]]], total: dict[str, int], tokens: int
) -> Iterator[dict[str, Any]]:
    for method, kind in itertools.product(_METHODS, (*KINDS, "all")):
        found = [result for of, result in results[method] if kind in (of, "all")]
        yield {
            "method": method,
            "kind": kind,
            "tokens": tokens,
            "facts": total[kind],
            "asked": len(found),
            "changed": common.mean(each.says == 1 for each in found),
            "old": common.mean(each.says == 0 for each in found),
            "kept": common.mean(each.kept for each in found),
            "computed_share": common.mean(each.computed for each in found),
            "ttft_s": statistics.median(each.ttft_s for each in found) if found else None,
        }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    engine = common.load_engine(arguments)
    engine.fingerprint  # noqa: B018 - digested before anything is timed
    passages = [passage.text for passage in common.read_passages(arguments.data)]
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        made = changes(_filler(engine, passages, tokens))[: arguments.limit]
        results: dict[str, list[tuple[str, _Result]]] = {method: [] for method in _METHODS}
        sizes = []
        with common.scratch(engine) as folder:
            bench = _Bench(engine, Path(folder))
            texts = list(dict.fromkeys(change.text for change in made))
            packs = {text: engine.build_pack(text, namespace="editing") for text in texts}
            sizes += [len(pack.token_ids) for pack in packs.values()]
            with ThreadPoolExecutor(arguments.at_once) as pool:
                found = pool.map(bench.results, [packs[change.text] for change in made], made)
                for change, each in zip(track(made, f"{tokens} tokens"), found, strict=True):
                    for method, result in each.items():
                        results[method].append((change.kind, result))
        total = {kind: sum(kind in (change.kind, "all") for change in made) for kind in (*KINDS, "all")}
        rows += _rows(results, total, round(statistics.median(sizes)))
    return {"rows": rows}


def _filler(engine: Session, passages: Sequence[str], tokens: int) -> list[str]:
    """Sentences of another world that make a record a text of about so many tokens."""
    room = tokens - len(engine.tokenizer.encode(changes()[0].text))
    found = []
    for passage in passages:
        room -= len(engine.tokenizer.encode(passage))
        if room < 0:
            break
        found.append(passage)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file and the plot."""
    facts = Path(__file__).parents[1] / "cookbooks" / "demo" / "facts.jsonl"
    parser = common.argument_parser(__doc__, str(facts))
    parser.add_argument("--tokens", type=int, nargs="+", default=[60, 1000], metavar="N", help="default: 60 1000")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="edits; times say nothing above 1")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plot there")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    columns = ("tokens", "asked", "changed", "old", "kept", "computed_share", "ttft_s")
    common.show_table(
        "Editing a fact",
        ("method, kind", *columns),
        [(f"{row['method']}, {row['kind']}", *(row[name] for name in columns)) for row in figures["rows"]],
        ["changed: answers with the new value, of the facts that the old text and a rebuild decide."],
    )
    if arguments.plots is not None:
        for tokens in dict.fromkeys(row["tokens"] for row in figures["rows"]):
            series = {
                method: [
                    row["changed"] for row in figures["rows"] if (row["method"], row["tokens"]) == (method, tokens)
                ]
                for method in _METHODS
            }
            plots.bars(arguments.plots, f"editing-{tokens}", (*KINDS, "all"), series, "answers with the new value")
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
