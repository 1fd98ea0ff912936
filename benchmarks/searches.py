"""What do twelve searches of an agent cost, each with several passages, and does it know in the end what it found?

Each conversation holds `--steps` searches: a tool call that asks for one fact of an invented world, and `--packs`
passages of about `--tokens` tokens, one of which has it (`benchmarks.questions`). The calls are given, as a small model
would stop or repeat itself; the first token behind each result is waited for. At the end, `--asked` of the questions
are put once more, each behind the whole conversation. Several agents on one engine, with nothing in memory before each:

- text: the tool returns the passages; the prefix tree reuses the conversation so far.
- the name of a composer: the tool returns handles of packs, which this composer brings in.

`first`: seconds to the first token, summed over the searches; `ratio` is that of the text agent, the median over
conversations. `sent` and `computed`: tokens of the last prompt, and tokens computed in all. `right`: final answers that
hold the fact, with the 95 % interval (Wilson).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rich.progress import track
from scipy.stats import binomtest

from benchmarks import common
from benchmarks.questions import Question, questions
from kp_core import PackStore, Session

__all__ = ["main", "run"]

_COMPOSERS = ("exact", "select", "select:packs=1")
_ANSWER = 20


def follow(engine: Session, store: PackStore, found: Sequence[Question], asked: int, name: str) -> dict[str, Any]:
    """What the agent `name` waits for and computes in one conversation, and how many final answers are right."""
    options: dict[str, Any] = {}
    if name != "text":
        options = {"view": store.view("default"), "composer": name, "keep": "never"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out about the towns, and remember it."}]
    first, computed = 0.0, 0
    common.reset(engine)
    for question in found:
        content: Sequence[object] = question.documents
        if name != "text":
            content = [store.put(pack) for pack in engine.build_packs(question.documents, progress=False)]
        call = {"name": "search", "arguments": {"query": question.asked}}
        result = {"role": "tool", "name": "search", "content": "\n\n".join(map(str, content))}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
        usage = engine.generate(messages, max_tokens=1, **options).usage
        first, computed = first + usage.ttft_s, computed + usage.computed_tokens
    right, sent = 0, usage.prompt_tokens + usage.pack_tokens
    for question in found[:: max(1, len(found) // asked)][:asked]:
        last = {"role": "user", "content": f"{common.INSTRUCTION}\nQuestion: {question.asked}"}
        answer = engine.generate([*messages, last], max_tokens=_ANSWER, **options).text
        right += common.contains(answer, question.answer)
    return {"first": first, "sent": sent, "computed": computed, "right": right}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    engine = common.load_engine(arguments)

    def encode(text: str) -> Sequence[int]:
        return list(engine.tokenizer.encode(text, add_special_tokens=False))

    stream = questions("world", arguments.packs, arguments.tokens, encode, arguments.seed)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("text", *arguments.composers)}
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        for _ in track(range(arguments.limit), "Conversations"):
            found = list(islice(stream, arguments.steps))
            for name, mine in rows.items():
                mine.append(follow(engine, store, found, arguments.asked, name))
            common.write_json(arguments.json, {"dtype": arguments.dtype, "conversations": rows})
    return {"dtype": arguments.dtype, "conversations": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "")
    parser.set_defaults(limit=10)
    parser.add_argument("--composers", nargs="+", default=_COMPOSERS, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="searches; default: %(default)s")
    parser.add_argument("--packs", type=int, default=4, metavar="N", help="passages of a search; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=130, metavar="N", help="of a passage; default: %(default)s")
    parser.add_argument("--asked", type=int, default=4, metavar="N", help="final questions; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the world; default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    shown = []
    for name, mine in figures["conversations"].items():
        ratios = [
            one["first"] / text["first"] for one, text in zip(mine, figures["conversations"]["text"], strict=True)
        ]
        right, asked = sum(one["right"] for one in mine), arguments.asked * len(mine)
        interval = binomtest(right, asked).proportion_ci(method="wilson")
        means = (common.mean(one[kind] for one in mine) for kind in ("first", "sent", "computed"))
        shown.append((name, *means, statistics.median(ratios), right / asked, interval.low, interval.high))
    common.show_table(
        f"{arguments.steps} searches, {arguments.packs} passages of {arguments.tokens} each, {figures['dtype']}",
        ("agent", "first", "sent", "computed", "ratio", "right", "low", "high"),
        shown,
    )
    return figures


if __name__ == "__main__":
    main()
