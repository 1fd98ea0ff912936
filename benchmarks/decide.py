"""Decisions: what questions about one state cost, and how often the likeliest label is the right one.

`--part times`: 1, 8 and 32 questions behind a pack of `--tokens` tokens, seconds of processor time, or wall time on a
GPU: `decide` with the pack in memory, from disk with an empty cache, and from disk in a new process that has answered
something else before (once); the same tokens as one prompt behind the pack; the same questions one after another as
answers of one token, and as answers held to a schema, which the system message shows, so that the pack is computed
behind it before; and `text`: the state is sent as text and nothing is reused (one is asked, the rest reckoned).

`--part lengths`: 32 questions of 16 to 128 tokens with four labels behind that pack, by rotations: seconds of `decide`,
of the questions as one prompt, and of an answer of one token to each.

`--part hotpotqa`: the comparison questions, between yes and no or between two titles. `--part personamem`: four
replies, over the nearest five passages; an answer with a schema is the letter of one. Of each way, right answers with a
95 % interval, the mean distance of confidence from accuracy in ten classes (`ece`), and the probability of so large a
difference from the schema-held answer by chance (exact McNemar). With `--json OUT`, each question is written to OUT
with the ending `.jsonl` when it is done, and the same command goes on there.

`--part grade`: what `KnowledgePackRetriever(grade=0.5)` does with five documents of `--tokens` / 5 tokens for each of
`--limit` questions (20): the share of those with the answer that it keeps, and of the others that it drops; and seconds
a question as above, of the grades and of the prompt with all five documents, both with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track
from scipy.stats import binomtest

from benchmarks import common
from benchmarks.answers import read_log
from benchmarks.memory import WAYS, Memory, read_set
from benchmarks.questions import questions
from kp_core import Fact, PackStore, Question, Session
from kp_core.banks.embed import SentenceTransformerEmbedder
from kp_langchain import KnowledgePackRetriever

__all__ = ["main"]

_COUNTS = (1, 8, 32)
_LENGTHS, _LABELS = (16, 32, 64, 128), ("spring", "summer", "autumn", "winter")
_REPEATS = 3
_SCHEMA = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
_WAYS = ("from_disk", "decide", "one_prompt", "one_token", "schema", "text")
_SETS, _DOCUMENTS, _GRADE, _GRADED = ("world", "single"), 5, 0.5, 20
_OPTION = re.compile(r"\n\([abcd]\) ")
_THINGS = ("river", "sea", "hill", "bridge", "town", "king", "forest", "boat")


class _Item(NamedTuple):
    state: str
    question: str
    labels: Sequence[str]
    right: int
    """The place of the right label."""
    written: str
    """The question as an answer with a schema is asked it."""
    names: Sequence[str]
    """The labels in that schema."""


def _seconds(act: Callable[[], object], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    begun = clock()
    act()
    return clock() - begun


def times(session: Session, arguments: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    """A row for each number of questions."""
    device = arguments.device
    text, handle = _pack(session, arguments.tokens, folder)
    for count in _COUNTS:
        found: dict[str, list[float]] = {}
        for shift in range(0, 1000 * _REPEATS, 1000):
            for at, name in enumerate(_WAYS):
                # Other questions each time, so that none of them is in memory.
                act, share = _ways(session, text, handle, folder, range(shift + 100 * at, shift + 100 * at + count))[at]
                if name in ("from_disk", "text"):
                    common.reset(session)
                else:
                    shared, view = f"{handle}\n\nWhat?", PackStore(folder).view("default")
                    if name == "schema":
                        session.generate(shared, view=view, max_tokens=24, response_schema=_SCHEMA)
                    else:
                        session.prefill(shared, view=view)
                found.setdefault(name, []).append(_seconds(act, device) * share)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            new = process.submit(_in_new_process, arguments, handle, folder, count).result()
        medians = {name: float(np.median(values)) for name, values in found.items()}
        yield {"questions": count, "new_process": new} | medians


def _pack(session: Session, tokens: int, folder: str) -> tuple[str, str]:
    """A text of `tokens` tokens, and the handle of its pack."""
    text = _text(
        session, "The river Lorne rises in the hills above Aldham and runs for ninety miles to the sea. ", tokens
    )
    return text, str(PackStore(folder).put(session.build_pack(text)))


def _text(session: Session, sentence: str, tokens: int) -> str:
    return str(session.tokenizer.decode(session.tokenizer.encode(sentence * tokens, add_special_tokens=False)[:tokens]))


def lengths(session: Session, arguments: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    """A row for each length of a question and each number of rotations."""
    _, handle = _pack(session, arguments.tokens, folder)
    view, number = PackStore(folder).view("default"), 0
    for tokens in _LENGTHS:
        sentence = _text(session, "in the driest year that anybody who lives beside it can remember ", tokens - 10)
        found: dict[str, list[float]] = {}
        for way in _REPEATS * ("one_prompt", "one_token", "1", "2", "all"):
            number += 1000  # Other questions each time, so that none of them is in memory.
            asked = [f"{number + at}: when is the river low, {sentence}?" for at in range(_COUNTS[-1])]
            session.prefill(f"{handle}\n\nWhat?", view=view)
            if way == "one_prompt":
                seconds = _seconds(
                    partial(session.prefill, f"{handle}\n\n" + "\n".join(asked), view=view), arguments.device
                )
            elif way == "one_token":
                each_asked = [f"{handle}\n\n{one}\n\nAnswer with {', '.join(_LABELS)}." for one in asked]
                each: Any = partial(list, map(partial(session.generate, view=view, max_tokens=1), each_asked))
                seconds = _seconds(each, arguments.device)
            else:
                questions = {one: Question(one, _LABELS) for one in asked}
                rotations: Any = way if way == "all" else int(way)
                act = partial(session.decide, handle, questions, view=view, rotations=rotations)
                seconds = _seconds(act, arguments.device)
            found.setdefault(way, []).append(seconds)
        medians = {name: float(np.median(values)) for name, values in found.items()}
        yield {"tokens": tokens} | medians


def _in_new_process(arguments: argparse.Namespace, handle: str, folder: str, count: int) -> float:
    """Seconds of `from_disk` where the pack was never read, in a process that has answered something else."""
    session = common.load_engine(arguments)
    session.generate("Say hello.", max_tokens=1)
    return _seconds(_ways(session, "", handle, folder, range(count))[0][0], arguments.device)


def _ways(
    session: Session, text: str, handle: str, folder: str, numbers: range
) -> Sequence[tuple[Callable[[], object], float]]:
    """What is timed for each of `_WAYS`, and by what its time is multiplied."""
    asked = [f"Does this passage say that the Lorne has a {_THINGS[n % 8]} of the age of {n}?" for n in numbers]
    written = [f"{question}\n\nAnswer with yes or no, and nothing else." for question in asked]
    questions, view = dict(enumerate(map(Question, asked))), PackStore(folder).view("default")

    def each(**options: Any) -> None:  # noqa: ANN401
        for question in written:
            session.generate(f"{handle}\n\n{question}", view=view, **options)

    joint = "\n".join(written)
    return (
        (lambda: session.decide(handle, questions, view=view), 1),
        (lambda: session.decide(handle, questions, view=view), 1),
        (lambda: session.prefill(f"{handle}\n\n{joint}", view=view), 1),
        (lambda: each(max_tokens=1), 1),
        (lambda: each(max_tokens=24, response_schema=_SCHEMA), 1),
        (lambda: session.generate(f"{text}\n\n{written[0]}", max_tokens=1, reuse=False), len(asked)),
    )


def hotpotqa(arguments: argparse.Namespace) -> Iterator[_Item]:
    """The comparison questions whose answer is yes, no, or one of two titles: the others ask for something else."""
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()]
    for row in [row for row in rows if row["type"] == "comparison"][: arguments.limit]:
        answer, facts = common.normalise(row["answer"]), row["gold_facts"]
        if answer in ("yes", "no") or row["question"].startswith(("Is ", "Are ", "Was ", "Were ")):
            labels, right = ["yes", "no"], {answer} & {"yes", "no"}
        else:
            labels = list(dict.fromkeys(fact["title"] for fact in facts))
            right = {fact["title"] for fact in facts if _is_of(fact, answer)}
        if len(right) == 1 and len(labels) > 1:
            state = "\n\n".join(f"{fact['title']}: {fact['text']}" for fact in facts)
            yield _Item(state, row["question"], labels, labels.index(right.pop()), row["question"], labels)


def _is_of(fact: Mapping[str, str], answer: str) -> bool:
    """Whether the answer is in the title, its ending "(film)" aside, or the full name with which the text begins."""
    title, text = common.normalise(fact["title"].partition(" (")[0]), common.normalise(fact["text"])
    return answer in title or text.startswith(answer)


def personamem(arguments: argparse.Namespace, session: Session) -> Iterator[_Item]:
    """The questions, each behind the nearest five passages."""
    sessions, asked = read_set("personamem", arguments.data.parent / "memory")
    embedder, left = SentenceTransformerEmbedder(), arguments.limit or 10**9
    for user, of_user in asked.items():
        if left <= 0:
            return
        memory = Memory(sessions[user], session, embedder)
        for one in of_user[:left]:
            texts, _ = memory.best(WAYS["personamem"][0], one.question)
            question, *options = map(str.strip, _OPTION.split(one.question))
            right = "abcd".index(one.answers[-1])
            if len({*options}) == len(options):  # Two are alike now and then.
                yield _Item("\n\n".join(texts), question, options, right, one.question, list("abcd"))
        left -= len(of_user)


def accuracy(session: Session, items: Sequence[_Item], log: Path | None, cell: str) -> Iterator[dict[str, Any]]:
    """A row for each way. Each question is written to `log` when it is done, and taken from there."""
    said: dict[str, list[tuple[bool, float]]] = {"schema": [], "decide": [], "all rotations": []}
    done = {number: line["record"] for number, line in read_log(log).get(cell, {}).items()} if log else {}
    for number, item in enumerate(track(items, "Deciding")):
        if number not in done:
            done[number] = dict(_said(session, item))
            if log:
                with log.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"cell": cell, "number": number, "record": done[number]}) + "\n")
        for way, answers in said.items():
            answers.append(tuple(done[number][way]))
    for way, answers in said.items():
        right, confidence = np.array(answers, float).T
        classes = np.minimum((confidence * 10).astype(int), 9)
        gaps = [abs((right - confidence)[classes == number].sum()) for number in range(10)]
        only = [int(np.sum((right == 1) & ([r for r, _ in said["schema"]] == np.zeros(len(right)))))]
        only.append(int(np.sum((right == 0) & ([r for r, _ in said["schema"]] == np.ones(len(right))))))
        low, high = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
        yield {
            "way": way,
            "n": len(right),
            "right": float(right.mean()),
            "low": float(low),
            "high": float(high),
            "ece": float(sum(gaps) / len(right)) if way != "schema" else None,
            "p": float(binomtest(only[0], sum(only)).pvalue) if sum(only) else 1.0,
        }


def _said(session: Session, item: _Item) -> Iterator[tuple[str, tuple[bool, float]]]:
    """Of each way, whether its answer is right, and its confidence."""
    answer = {"type": "object", "properties": {"answer": {"enum": [*item.names]}}, "required": ["answer"]}
    text = session.generate(f"{item.state}\n\n{item.written}", response_schema=answer, max_tokens=64).text
    chosen = ""
    with suppress(ValueError):
        chosen = json.loads(text)["answer"]
    yield "schema", (chosen == item.names[item.right], 1.0)
    question = {0: Question(item.question, item.labels)}
    for way, rotations in (("decide", 1), ("all rotations", len(item.labels))):
        decision = session.decide(item.state, question, rotations=rotations).answers[0]
        yield way, (decision.label == item.labels[item.right], decision.confidence)


def graded(session: Session, arguments: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    """A row for each set of questions."""
    encode = partial(session.tokenizer.encode, add_special_tokens=False)
    embedder, store = SentenceTransformerEmbedder(), PackStore(folder)
    for kind in _SETS:
        kept: dict[bool, list[bool]] = {True: [], False: []}
        seconds = list[tuple[float, float]]()
        asked = islice(questions(kind, _DOCUMENTS, arguments.tokens // _DOCUMENTS, encode), arguments.limit or _GRADED)
        for number, one in enumerate(track(list(asked), f"Grading: {kind}")):
            retriever = KnowledgePackRetriever.from_facts(
                map(Fact, one.documents),
                engine=session,
                store=store,
                embedder=embedder,
                namespace=f"{kind}{number}",
                k=_DOCUMENTS,
                content="handle",
                progress=False,
            )
            found, searching = _fresh(session, partial(retriever.invoke, one.asked), arguments.device)
            good, grading = _fresh(session, partial(retriever.invoke, one.asked, grade=_GRADE), arguments.device)
            prompt = common.prompt((document.page_content for document in found), one.asked)
            view = store.view(f"{kind}{number}")
            _, prefill = _fresh(session, partial(session.prefill, prompt, view=view), arguments.device)
            seconds.append((grading - searching, prefill))
            for document in found:
                kept[common.contains(document.metadata["text"], one.answer)].append(document in good)
        grades, prompts = zip(*seconds, strict=True)
        yield {
            "set": kind,
            "questions": len(seconds),
            "with_answer": len(kept[True]),
            "kept": common.mean(kept[True]),
            "others": len(kept[False]),
            "dropped": 1 - common.mean(kept[False]),
            "grades_s": common.mean(grades),
            "prompt_s": common.mean(prompts),
        }


def _fresh(session: Session, act: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What `act` gives, and its seconds, with an empty cache."""
    common.reset(session)
    given = list[Any]()
    took = _seconds(lambda: given.append(act()), device)
    return given[0], took


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--part", default="times", choices=("times", "lengths", "hotpotqa", "personamem", "grade"))
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="of the pack or documents; default: 1000")
    arguments = parser.parse_args(argv)
    session = common.load_engine(arguments)
    if arguments.part in (timed := {"times": times, "lengths": lengths, "grade": graded}):
        with common.scratch(session) as folder:
            rows = list(timed[arguments.part](session, arguments, folder))
    else:
        items = hotpotqa(arguments) if arguments.part == "hotpotqa" else personamem(arguments, session)
        log = arguments.json and arguments.json.with_suffix(".jsonl")
        cell = json.dumps([arguments.part, str(arguments.model), arguments.dtype])
        rows = list(accuracy(session, list(items), log, cell))
    columns = tuple(rows[0])
    common.show_table(f"Decisions: {arguments.part}", columns, [tuple(row.values()) for row in rows])
    figures = {"part": arguments.part, "tokens": arguments.tokens, "rows": rows}
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
