"""What does an agent's tenth search cost? HotpotQA questions in the distractor setting, one paragraph found per search.

An agent reads one more paragraph at each search and then calls the model with the question and all it has read.
Paragraphs come supporting and distracting in turn, each kind in the order of the data, then the rest; so a question
with two supporting paragraphs can be answered from the third search on. Two agents see the same token ids:

- text: the paragraphs stand as text in the system message; every call prefills everything (`reuse=False`).
- pack: each paragraph is a stored pack (built with `compiled_for="system"`), and calls carry the handles
  (`placement="system"`). It calls at every search; searches between the reported ones are prefilled only.

Each row is one model call after that many searches, as means over the questions; `prompt_tokens` are those the caller
sends, `pack_tokens` those the handles deliver, `computed_tokens` those prefilled by this call, `seconds` its wall
time. EM is the cover EM of `benchmarks.equivalence`.

Knowledge tokens computed are counted from above (everything computed before the question's own tokens); a run in
which they exceed the tokens of the packs for any question has computed some token twice, and says so.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.progress import track

from benchmarks import common
from kp_core import Generation, Message, PackStore, Session

__all__ = ["found_paragraphs", "main", "run"]

_SEARCHES = (1, 2, 3, 5, 10)
_AGENTS = ("text", "pack")


def found_paragraphs(example: common.Example) -> list[common.Paragraph]:
    """The paragraphs in the order in which the searches find them: supporting, distracting, supporting, ..."""
    supporting = [paragraph for paragraph in example.paragraphs if paragraph.is_supporting]
    others = [paragraph for paragraph in example.paragraphs if not paragraph.is_supporting]
    pairs = itertools.zip_longest(supporting, others)
    return [paragraph for pair in pairs for paragraph in pair if paragraph is not None]


class _Agents:
    """Both agents on one question."""

    def __init__(self, engine: Session, store: PackStore, example: common.Example, max_tokens: int) -> None:
        self._engine, self._view, self._max_tokens = engine, store.view("default"), max_tokens
        self._question = f"{common.INSTRUCTION}\nQuestion: {example.question}"
        self.texts = [str(paragraph) for paragraph in found_paragraphs(example)]
        packs = engine.build_packs(self.texts, compiled_for="system", progress=False)
        self._handles = [str(store.put(pack)) for pack in packs]
        # Building leaves KV behind; each question starts from the store.
        engine.clear_cache()
        self.knowledge_computed = self.knowledge_delivered = 0

    def read(self, searches: int) -> None:
        """The pack agent's call after a search that is not reported."""
        prefill = self._engine.prefill(
            self._question, packs=self._handles[:searches], view=self._view, placement="system"
        )
        self._count(prefill.usage.computed_tokens, prefill.prompt)

    def pack(self, searches: int) -> Generation:
        """The pack agent's call after `searches`."""
        found = self._engine.generate(
            self._question,
            packs=self._handles[:searches],
            view=self._view,
            placement="system",
            max_tokens=self._max_tokens,
        )
        self._count(found.usage.computed_tokens, found.prompt)
        return found

    def text(self, searches: int) -> Generation:
        """The text agent's call after `searches`."""
        knowledge = "".join(f"{text.strip()}\n" for text in self.texts[:searches])
        messages: list[Message] = [
            {"role": "system", "content": knowledge},
            {"role": "user", "content": self._question},
        ]
        return self._engine.generate(messages, reuse=False, max_tokens=self._max_tokens)

    def _count(self, computed: int, prompt: Any) -> None:  # noqa: ANN401 - a `Prompt`
        self.knowledge_computed += max(0, computed - (len(prompt) - prompt.spans[-1].stop))
        self.knowledge_delivered = prompt.pack_tokens


def measure(
    agents: _Agents, example: common.Example, searches: Sequence[int]
) -> dict[int, dict[str, dict[str, float]]]:
    """Per number of searches: each agent's figures. Raises `RuntimeError` when the two saw different tokens."""
    rows: dict[int, dict[str, dict[str, float]]] = {}
    for count in range(1, max(searches) + 1):
        if count not in searches:
            agents.read(count)
            continue
        rows[count] = {}
        prompts = []
        for name, ask in (("pack", agents.pack), ("text", agents.text)):
            began = time.perf_counter()
            found = ask(count)
            rows[count][name] = {
                "seconds": time.perf_counter() - began,
                "em": float(common.contains(common.first_line(found.text), example.answer)),
                "prompt_tokens": found.usage.prompt_tokens,
                "pack_tokens": found.usage.pack_tokens,
                "computed_tokens": found.usage.computed_tokens,
            }
            prompts.append(found.prompt.token_ids)
        if prompts[0] != prompts[1]:
            raise RuntimeError(f"{example.question}: after {count} searches the agents' prompts differ.")
    return rows


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The figures, as the JSON file holds them, and what else there is to say."""
    examples = common.read_examples(arguments.data, arguments.limit)
    engine = common.load_engine(arguments)
    measured: dict[int, list[dict[str, dict[str, float]]]] = defaultdict(list)
    computed = delivered = once = constant = 0
    for example in track(examples, "Questions"):
        # More searches than paragraphs find nothing new.
        searches = [count for count in arguments.searches if count <= len(example.paragraphs)]
        if not searches:
            continue
        with common.scratch(engine) as folder:
            agents = _Agents(engine, PackStore(folder), example, arguments.tokens)
            rows = measure(agents, example, searches)
        for count, row in rows.items():
            measured[count].append(row)
        computed += agents.knowledge_computed
        delivered += agents.knowledge_delivered
        once += agents.knowledge_computed <= agents.knowledge_delivered
        constant += len({row["pack"]["prompt_tokens"] for row in rows.values()}) == 1
    n = max(map(len, measured.values()), default=0)
    notes = [
        f"Prompt tokens of the pack agent the same at every search: {constant} of {n} questions",
        f"Every knowledge token computed at most once: {once} of {n} questions",
        f"Knowledge tokens computed in all calls together, and held by the packs: {computed}, {delivered}",
    ]
    return {
        "n": n,
        "dtype": arguments.dtype,
        "rows": [_row(count, measured[count]) for count in sorted(measured)],
    }, notes


def _row(searches: int, found: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    def both(name: str) -> dict[str, float]:
        return {agent: common.mean(each[agent][name] for each in found) for agent in _AGENTS}

    return {
        "searches": searches,
        "em": both("em"),
        "prompt_tokens": both("prompt_tokens"),
        "pack_tokens": both("pack_tokens")["pack"],
        "computed_tokens": both("computed_tokens"),
        "seconds": both("seconds"),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_distractor.jsonl")
    parser.add_argument("--searches", type=int, nargs="+", default=_SEARCHES, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="most tokens of an answer; default: 24")
    arguments = parser.parse_args(argv)
    figures, notes = run(arguments)
    pairs = [f"{name} {agent}" for name in ("EM", "prompt", "computed", "seconds") for agent in _AGENTS]
    columns = ("searches", *pairs, "pack tokens")
    rows = [
        (
            row["searches"],
            *(f"{row['em'][agent]:.1%}" for agent in _AGENTS),
            *(f"{row[name][agent]:.1f}" for name in ("prompt_tokens", "computed_tokens") for agent in _AGENTS),
            *(f"{row['seconds'][agent]:.2f}" for agent in _AGENTS),
            f"{row['pack_tokens']:.1f}",
        )
        for row in figures["rows"]
    ]
    common.show_table(
        f"Accumulation: {figures['n']} questions, {figures['dtype']}, means per call", columns, rows, notes
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
