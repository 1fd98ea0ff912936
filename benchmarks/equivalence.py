"""Is the answer from a pack the answer from text? HotpotQA questions with their gold facts, greedy answers.

Text is the plain string that somebody without packs sends: facts, a blank line, instruction and question, in an engine
that holds no KV, with no store, no handle and no view. The run stops with an error when a token of it was reused. All
gold facts of a question make one pack, delivered by its handle at the start of the same message, on a second engine.
Each column is compared with text: output token ids, and the bits of the first logits.

- pack_text: the pack from memory, where it was built and asked something else before.
- pack_disk: the pack from its store, opened again, nothing in memory.
- after_turns: a second question behind the first one and its answer, whose decoded KV is reused. Text is the whole
  conversation.
- at_once: eight questions at once, every second one with its handle and the others as text, each against text alone.
- restart: the facts in two packs in one message, asked with `keep="always"`, then again with nothing in memory and the
  store opened again. Text has the two behind each other. Counted when either differs.
- pack_hf: the token ids of the prompt through plain `model.generate`, default attention, a model loaded apart from the
  engine. Outputs only.
- scores: no comparison, but the answers of three more prompts through plain `model.generate`: `none` (instruction and
  question only), `raw` (text without the chat template) and `split` (facts and question rendered in two template calls,
  so that a second default system header stands between them).

`--sizes` adds packs of that many tokens from Wikipedia passages, for pack_text and pack_disk. With `--model gemma` (see
`benchmarks.models`) the sizes are by default such that they cross its windows. With `--answers` rows are kept in a
file, and a run that was interrupted goes on.

Scores: the first line that is not blank, normalised as SQuAD and HotpotQA do, against the gold answer, equal (strict
EM) or by words shared (F1). EM is how often the first line at least contains the gold answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from benchmarks import common
from benchmarks.ttft import knowledge
from kp_core import Generation, Message, PackStore, PackView, Session

__all__ = ["COLUMNS", "main", "question_text", "run", "split_prompt"]

COLUMNS = ("pack_text", "pack_disk", "after_turns", "at_once", "restart", "pack_hf")
_ABOUT = {
    "pack_text": "pack from memory",
    "pack_disk": "pack from disk",
    "after_turns": "behind a turn that was decoded",
    "at_once": "eight at once",
    "restart": "two packs, kept over a restart",
    "pack_hf": "plain model.generate",
}
_CONDITIONS = ("none", "text", "pack", "raw", "split")
_CHOICES = (*COLUMNS, "scores")
_AT_ONCE = 8
_GEMMA_SIZES = (200, 1000, 2500, 4000)  # Its windows are of 512.
_FOLLOW_UP = "Say this again in one full sentence."
_SPARE = "The sun rises in the east, stands in the south at noon, and sets in the west."  # Beside a single fact.
_STEP = 400  # Passages between those that packs of one size are made of.


@dataclass(frozen=True)
class _Case:
    """Facts and what is asked about them."""

    facts: tuple[str, ...]
    ask: str

    @property
    def text(self) -> str:
        """All facts, as one pack holds them."""
        return "\n".join(self.facts)

    def said(self, *knowledge: str) -> str:
        """The user message, with the facts as `knowledge`."""
        return "\n\n".join((*knowledge, self.ask))


@dataclass
class _Row:
    """How the columns of one question compare with text; as the file of answers keeps it."""

    differ: dict[str, bool] = field(default_factory=dict)
    bits: dict[str, bool] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    turns_reused: bool = False
    """Whether KV of the decoded answer was reused."""
    text_reused_tokens: int = 0

    def compare(self, column: str, found: Generation, text: Generation) -> None:
        """Add `found` to a column; raises `RuntimeError` where its prompt is not the one of `text`."""
        if found.prompt.token_ids != text.prompt.token_ids:
            raise RuntimeError(f"{column}: the prompt {found.prompt.rendered!r} has other tokens than its text.")
        self.differ[column] = self.differ.get(column, False) or found.token_ids != text.token_ids
        same = common.same_bits(found.logits, text.logits)
        self.bits[column] = self.bits.get(column, True) and same


class _Rows:
    """Rows by what was asked; in a JSON-lines file where there is a `path`."""

    def __init__(self, path: Path | None, settings: Sequence[object]) -> None:
        self._path, self._settings = path, json.dumps(settings)
        self._rows: dict[str, _Row] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
            kept = json.loads(line)
            if kept["settings"] == self._settings:
                self._rows[kept["key"]] = _Row(**kept["row"])

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> _Row:
        return self._rows[key]

    def keep(self, key: str, row: _Row) -> None:
        """Take a row."""
        self._rows[key] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"settings": self._settings, "key": key, "row": vars(row)}) + "\n")


def question_text(question: str) -> str:
    """What is asked, below the facts."""
    return f"{common.INSTRUCTION}\nQuestion: {question}"


def split_prompt(engine: Session, facts: str, question: str) -> str:
    """The facts' user message as one template call renders it, then the question's as a second call does."""
    turns: list[list[Message]] = [[{"role": "user", "content": facts}], [{"role": "user", "content": question}]]
    parts = [engine.template.render(turn, add_generation_prompt=turn is turns[-1]) for turn in turns]
    return "".join(engine.template.text(part) for part in parts)


class _Engines(NamedTuple):
    """One for text, which holds no KV before any request, one for packs, and plain transformers."""

    strings: Session
    packs: Session
    twin: common.Twin | None


class _Desk:
    """Asks what the columns compare, with a store in `folder`."""

    def __init__(self, arguments: argparse.Namespace, engines: _Engines, folder: str) -> None:
        self._strings, self._engine, self._twin = engines
        self._columns, self._tokens, self._folder = arguments.columns, arguments.tokens, folder
        self._store = PackStore(folder)

    def alone(self, case: _Case) -> tuple[_Row, str, Generation]:
        """All columns that need no other question, with the handle of the pack and text's answer."""
        text = self._plain(case.said(case.text))
        row = _Row(said={"text": text.text}, text_reused_tokens=text.usage.reused_tokens)
        self._engine.clear_cache()
        handle, found = self._build(case.text), None
        for column, answer in self._ways(case, handle):
            found = answer()
            row.compare(column, found, text)
        if self._twin is not None and "pack_hf" in self._columns:
            found = found or self._warm(case, handle)
            plain = self._twin.generate([found.prompt.token_ids], self._tokens)[0]
            row.differ["pack_hf"] = self._twin.without_end(found.token_ids) != plain
        if found is not None:
            row.said["pack"] = found.text
        if "after_turns" in self._columns:
            self._turns(row, case, handle)
        if "restart" in self._columns:
            self._restart(row, case)
        if self._twin is not None and "scores" in self._columns:
            row.said |= self._scored(self._twin, case)
        return row, handle, text

    def at_once(self, answered: Sequence[tuple[_Row, str, Generation]], cases: Sequence[_Case]) -> None:
        """Fill the column `at_once` of some questions."""
        view, requests = self._restarted(), dict[int, dict[str, Any]]()
        for at, ((_, handle, _), case) in enumerate(zip(answered, cases, strict=True)):
            is_text = at % 2 == 0
            requests[at] = {"messages": case.said(case.text if is_text else handle), "view": None if is_text else view}
        options: dict[str, Any] = {"at_once": _AT_ONCE, "max_tokens": self._tokens, "progress": False}
        for at, found in self._engine.generate_many(requests, **options):
            row, _, text = answered[at]
            row.compare("at_once", found, text)

    def _plain(self, messages: Sequence[Message] | str) -> Generation:
        """The answer to text; raises `RuntimeError` when anything was reused for it."""
        self._strings.clear_cache()
        text = self._strings.generate(messages, max_tokens=self._tokens)
        if text.usage.reused_tokens or text.usage.pack_tokens:
            raise RuntimeError(f"Expected a plain string to be computed from its start, got {text.usage}.")
        return text

    def _build(self, text: str) -> str:
        """The handle of a pack, which is in the store and, as it was just built, in memory."""
        return str(self._store.put(self._engine.build_pack(text)))

    def _restarted(self) -> PackView:
        """The packs as a new process finds them: nothing in memory, the store opened again."""
        self._engine.when_idle(lambda: None).result()
        self._engine.clear_cache()
        return PackStore(self._folder).view("default")

    def _read(
        self,
        messages: Sequence[Message] | str,
        source: str,
        view: PackView,
        **options: Any,  # noqa: ANN401 - as the engine's
    ) -> Generation:
        """The answer from packs; raises `RuntimeError` when their KV does not come from `source` (see `explain`)."""
        counts = self._engine.explain(messages, view=view, **options).counts
        found = self._engine.generate(messages, view=view, max_tokens=self._tokens, **options)
        packed = found.usage.pack_tokens
        if not counts.get(source) or not found.usage.reused_tokens >= packed > 0:
            raise RuntimeError(f"Expected packs to be read from {source!r}, got {dict(counts)}, then {found.usage}.")
        return found

    def _ways(self, case: _Case, handle: str) -> Iterator[tuple[str, Callable[[], Generation]]]:
        """The same prompt in several ways; the first needs what `_build` left in memory."""
        if "pack_text" in self._columns:
            yield "pack_text", lambda: self._warm(case, handle)
        if "pack_disk" in self._columns:
            yield "pack_disk", lambda: self._read(case.said(handle), "pack", self._restarted())

    def _warm(self, case: _Case, handle: str) -> Generation:
        """The answer from a pack that is in memory."""
        view = self._store.view("default")
        self._engine.generate(f"{handle}\n\nWhat is this about?", view=view, max_tokens=2)
        return self._read(case.said(handle), "tree", view)

    def _turns(self, row: _Row, case: _Case, handle: str) -> None:
        view = self._restarted()
        first = self._read(case.said(handle), "pack", view)

        def turns(knowledge: str) -> list[Message]:
            return [
                {"role": "user", "content": case.said(knowledge)},
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": _FOLLOW_UP},
            ]

        found = self._read(turns(handle), "tree", view)
        row.turns_reused = found.usage.reused_tokens > len(first.prompt)
        row.compare("after_turns", found, self._plain(turns(case.text)))

    def _restart(self, row: _Row, case: _Case) -> None:
        one, *others = case.facts
        two = "\n".join(others) or _SPARE
        text = self._plain(case.said(one, two))
        self._engine.clear_cache()
        said, view = case.said(self._build(one), self._build(two)), self._store.view("default")
        row.compare("restart", self._engine.generate(said, view=view, keep="always", max_tokens=self._tokens), text)
        row.compare("restart", self._read(said, "kept", self._restarted(), keep="always"), text)

    def _scored(self, twin: common.Twin, case: _Case) -> dict[str, str]:
        """What plain transformers says to prompts that are only scored."""
        engine, encode = self._engine, twin.tokenizer.encode
        prompts = {
            "none": engine.template.render(case.ask).token_ids,
            "raw": encode(case.said(case.text), add_special_tokens=True),
            "split": encode(split_prompt(engine, case.text, case.ask), add_special_tokens=False),
        }
        return {
            name: twin.tokenizer.decode(twin.generate([ids], self._tokens)[0], skip_special_tokens=True)
            for name, ids in prompts.items()
        }


def _questions(arguments: argparse.Namespace, engines: _Engines, cases: Sequence[_Case], rows: _Rows) -> list[_Row]:
    """A row for each question."""
    for start in track(range(0, len(cases), _AT_ONCE), "Questions, eight at a time"):
        group = range(start, min(start + _AT_ONCE, len(cases)))
        if all(str(at) in rows for at in group):
            continue
        asked = [cases[at] for at in group]
        with common.scratch(engines.packs) as folder:
            desk = _Desk(arguments, engines, folder)
            answered = [desk.alone(case) for case in asked]
            if "at_once" in arguments.columns:
                desk.at_once(answered, asked)
        for at, (row, _, _) in zip(group, answered, strict=True):
            rows.keep(str(at), row)
    return [rows[str(at)] for at in range(len(cases))]


def _sizes(arguments: argparse.Namespace, engines: _Engines, rows: _Rows) -> list[dict[str, Any]]:
    """Figures for packs of each size."""
    if not arguments.sizes:
        return []
    sized = argparse.Namespace(**{**vars(arguments), "columns": ("pack_text", "pack_disk")})
    passages, found = common.read_passages(arguments.passages), []
    for tokens in track(arguments.sizes, "Sizes"):
        keys = [f"{tokens} tokens, {number}" for number in range(arguments.repeats)]
        for number, key in enumerate(keys):
            if key not in rows:
                chosen = passages[number * _STEP : (number + 1) * _STEP]
                case = _Case((knowledge(engines.packs, chosen, tokens).text,), f"What is said of {chosen[0].title}?")
                with common.scratch(engines.packs) as folder:
                    rows.keep(key, _Desk(sized, engines, folder).alone(case)[0])
        found.append({"tokens": tokens, "n": len(keys), **_counted([rows[key] for key in keys], sized.columns)})
    return found


def _counted(rows: Sequence[_Row], columns: Iterable[str]) -> dict[str, Any]:
    """Of each column: how many outputs differ, how many first logits are bit-identical, which rows differ in either."""
    named = list(columns)
    with_bits = [name for name in named if name != "pack_hf"]
    return {
        "differ": {name: sum(row.differ[name] for row in rows) for name in named},
        "bits": {name: sum(row.bits[name] for row in rows) for name in with_bits},
        "other": {
            name: [at for at, row in enumerate(rows) if row.differ[name] or not row.bits[name]] for name in with_bits
        },
    }


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float | None]]:
    """The figures, as the JSON file holds them, and strict EM beside them."""
    examples = common.read_examples(arguments.data, arguments.limit)
    cases = [_Case(tuple(map(str, each.paragraphs)), question_text(each.question)) for each in examples]
    engine = common.load_engine(arguments)
    needs_twin = cases and {"pack_hf", "scores"} & set(arguments.columns)
    twin = common.Twin(arguments, engine.tokenizer) if needs_twin else None
    engines = _Engines(common.load_engine(arguments), engine, twin)
    rows = _Rows(arguments.answers, [engine.fingerprint.id, arguments.tokens, sorted(arguments.columns)])
    found = _questions(arguments, engines, cases, rows)
    pairs = list(zip(examples, found, strict=True))

    def scored(score: Callable[[str, str], float]) -> dict[str, float | None]:
        return {
            name: common.mean(score(common.first_line(row.said[name]), example.answer) for example, row in pairs)
            if found and all(name in row.said for row in found)
            else None
            for name in _CONDITIONS
        }

    counted = _counted(found, [name for name in COLUMNS if name in arguments.columns])
    return {
        "n": len(examples),
        "dtype": arguments.dtype,
        "em": scored(common.contains),
        "f1": scored(common.f1),
        "differ": counted["differ"],
        "bit_identical": counted["bits"].get("pack_text"),
        "bits": counted["bits"],
        "other": counted["other"],
        "text_reused_tokens": sum(row.text_reused_tokens for row in found),
        "turns_reused": sum(row.turns_reused for row in found),
        "sizes": _sizes(arguments, engines, rows),
        "model": engine.name,
        "bitwise": "bitwise" in engine.supports,
        "why_not_bitwise": engine.lacks.get("bitwise"),
    }, scored(common.exact_match)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="most tokens of an answer; default: 24")
    parser.add_argument("--columns", nargs="+", choices=_CHOICES, default=_CHOICES, help="default: all")
    parser.add_argument("--compare-only", action="store_true", help="all columns but scores")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="TOKENS", help="packs of these sizes besides")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="packs of each size; default: %(default)s")
    parser.add_argument("--passages", type=Path, default=common.data_folder() / "wiki_passages.jsonl", metavar="FILE")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keep what is computed here, and go on from it")
    arguments = parser.parse_args(argv)
    if arguments.compare_only:
        arguments.columns = [name for name in arguments.columns if name != "scores"]
    if arguments.model == "bundled":
        arguments.model = None
    if arguments.model == "gemma":
        arguments.sizes = arguments.sizes or _GEMMA_SIZES
    arguments.model = common.model_path(arguments)
    figures, strict = run(arguments)
    _show(figures, strict)
    common.write_json(arguments.json, figures)
    return figures


def _show(figures: dict[str, Any], strict: dict[str, float | None]) -> None:
    n, rows = figures["n"], list[tuple[object, ...]]()
    if n:
        rows += [(_ABOUT[name], n, differ, figures["bits"].get(name, "")) for name, differ in figures["differ"].items()]
    for size in figures["sizes"]:
        rows += [
            (f"{_ABOUT[name]}, {size['tokens']:,} tokens", size["n"], differ, size["bits"][name])
            for name, differ in size["differ"].items()
        ]
    notes = [f"Tokens of plain strings that were reused: {figures['text_reused_tokens']}"]
    if "after_turns" in figures["differ"]:
        notes.append(f"Conversations in which decoded KV was reused: {figures['turns_reused']} of {n}")
    if figures["why_not_bitwise"]:
        notes.append(f"The engine promises no equal bits: {figures['why_not_bitwise']}.")
    for name, score in {"EM": figures["em"], "EM, strict": strict, "F1": figures["f1"]}.items():
        shares = [f"{condition} {share:.1%}" for condition, share in score.items() if share is not None]
        notes += [f"{name}: {', '.join(shares)}"] if shares else []
    columns = ("compared with the plain string", "n", "outputs differ", "first logits bit-identical")
    common.show_table(f"Equivalence: {figures['model']}, {figures['dtype']}", columns, rows, notes)


if __name__ == "__main__":
    main()
