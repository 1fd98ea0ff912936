"""LlamaIndex over packs: the same answers as from text, and an agent that does not compute twice what it read.

Query engine: the gold facts of all questions make one `VectorStoreIndex`. Each question is asked of a
`RetrieverQueryEngine` in `compact` mode twice on one engine, with packs and with the same nodes as text, the cache
cleared before each. Answers are compared as text. The score counts answers that contain the gold answer as words.

Agent: a `FunctionAgent` searches at every one of so many steps, and each search gives the next passage of the data. The
tool choice is forced, as a small model would stop or repeat itself. `packs`: search gives handles. `text`: search gives
text. `text, no cache`: text with nothing kept between calls (`reuse=False`), as engines without a prefix cache do it.
Sent: prompt tokens outside packs. Computed: tokens prefilled.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.schema import TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index_instrumentation import get_dispatcher
from rich.progress import track

from benchmarks import common
from kp_core import PackStore, Session, bundled_embedder
from kp_llamaindex import KnowledgePackLLM, KnowledgePackPostprocessor

__all__ = ["main", "run"]

_NAMESPACE = "hotpot"
_CONDITIONS: dict[str, dict[str, bool]] = {
    "packs": {},
    "text": {},
    "text, no cache": {"keeps": False},
}
_SHOWN = (1, 2, 5, 10, 15)


class _Usages(BaseEventHandler):
    """Collects the usage of every chat."""

    seen: list[dict[str, int]] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Usages"

    def handle(self, event: Any, **_: Any) -> None:  # noqa: ANN401
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            raw: Any = event.response.raw
            self.seen.append(raw["kp"])


class _Searching(KnowledgePackLLM):
    """Calls `search` at every step; with `keeps` false, keeps nothing between calls."""

    keeps: bool = True

    def _prepare_chat_with_tools(self, *args: Any, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
        asked = super()._prepare_chat_with_tools(*args, **{**settings, "tool_choice": "search"})
        return {**asked, "reuse": self.keeps}


def ask_all(
    engine: Session, store: PackStore, examples: Sequence[common.Example], tokens: int, top_k: int
) -> dict[str, Any]:
    """Every question from packs and from text."""
    nodes = {
        str(part): TextNode(text=str(part)) for example in examples for part in example.paragraphs if part.is_supporting
    }
    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=(_NAMESPACE,), max_tokens=tokens)
    index = VectorStoreIndex(list(nodes.values()), embed_model=HuggingFaceEmbedding(str(bundled_embedder())))
    packing = KnowledgePackPostprocessor(engine=engine, store=store, namespace=_NAMESPACE, precompile="now")
    packing.compile(nodes.values())
    usages = _Usages()
    get_dispatcher().add_event_handler(usages)
    said: dict[str, list[str]] = {"packs": [], "text": []}
    sent: dict[str, list[int]] = {"packs": [], "text": []}
    for example in track(examples, "Questions"):
        for condition, steps in (("packs", [packing]), ("text", [])):
            engine.clear_cache()
            usages.seen.clear()
            query_engine = index.as_query_engine(llm, similarity_top_k=top_k, node_postprocessors=steps)
            said[condition].append(str(query_engine.query(example.question)))
            sent[condition].append(sum(usage["prompt_tokens"] for usage in usages.seen))
    get_dispatcher().event_handlers.remove(usages)
    return {
        "n": len(examples),
        "differ": sum(pack != text for pack, text in zip(said["packs"], said["text"], strict=True)),
        "contains": {
            condition: common.mean(
                common.contains(answer, example.answer) for answer, example in zip(answers, examples, strict=True)
            )
            for condition, answers in said.items()
        },
        "sent": {condition: common.mean(counts) for condition, counts in sent.items()},
    }


async def follow(engine: Session, store: PackStore, passages: Sequence[str], condition: str) -> list[dict[str, float]]:
    """The usage and `ttft_s` of every step of an agent that reads `passages` one by one."""
    as_handles = not condition.startswith("text")
    found: Iterator[str] = iter(
        str(store.put(engine.build_pack(passage, namespace=_NAMESPACE, lazy=True))) if as_handles else passage
        for passage in passages
    )

    def search(query: str) -> str:  # noqa: ARG001 - whatever is asked, the next passage is found
        """Search the library."""
        return next(found)

    settings: Any = {"max_tokens": 48, **_CONDITIONS[condition]}
    llm = _Searching(engine=engine, store=store, namespaces=(_NAMESPACE,), **settings)
    agent = FunctionAgent(
        tools=[search], llm=llm, allow_parallel_tool_calls=False, early_stopping_method="generate", timeout=None
    )
    engine.clear_cache()
    handler = agent.run("Read all there is about the question.", max_iterations=len(passages))
    steps = [event.raw["kp"] async for event in handler.stream_events() if isinstance(event, AgentStream) and event.raw]
    await handler
    return steps[: len(passages)]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    examples = common.read_examples(arguments.data, arguments.limit)
    engine = common.load_engine(arguments)
    passages = list(dict.fromkeys(str(part) for example in examples for part in example.paragraphs))[: arguments.steps]
    with common.scratch(engine) as folder:
        questions = ask_all(engine, PackStore(folder), examples, arguments.tokens, arguments.top_k)
    agent = dict[str, Any]()
    for condition in track(_CONDITIONS, "Agent"):
        with common.scratch(engine) as folder:  # A store for each: what one has kept, the others must not read.
            agent[condition] = asyncio.run(follow(engine, PackStore(folder), passages, condition))
    return {"dtype": arguments.dtype, "questions": questions, "agent": agent}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the tables, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="most tokens of an answer; default: 24")
    parser.add_argument("--top-k", type=int, default=2, metavar="K", help="nodes per question; default: 2")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="searches of the agent; default: 20")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    questions = figures["questions"]
    common.show_table(
        f"RetrieverQueryEngine, compact: {questions['n']} questions, {figures['dtype']}",
        ("condition", "contains the answer", "tokens sent"),
        [
            (name, f"{questions['contains'][name]:.1%}", f"{questions['sent'][name]:.0f}")
            for name in questions["contains"]
        ],
        (f"Answers where packs differ from text: {questions['differ']} of {questions['n']}",),
    )
    rows = []
    for condition, steps in figures["agent"].items():
        for step in sorted({*_SHOWN, len(steps)} & set(range(1, len(steps) + 1))):
            at = steps[step - 1]
            rows.append((condition, step, at["prompt_tokens"], at["computed_tokens"], f"{at['ttft_s']:.2f}"))
        totals = [sum(one[name] for one in steps) for name in ("prompt_tokens", "computed_tokens", "ttft_s")]
        rows.append((condition, "all", *totals[:2], f"{totals[2]:.2f}"))
    columns = ("condition", "step", "sent", "computed", "first token, s")
    common.show_table(f"FunctionAgent, {figures['dtype']}", columns, rows)
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
