"""Questions about an invented world, which no model can know, answered by LangChain chains from text and from packs.

The facts are those of `cookbooks/demo`. Each question is asked with nothing in the engine's memory; what packs bring is
read from disk. Of several packs in a prompt the first is used as stored, the others are computed behind it. Right: the
reply contains the answer or an alias as whole words, in any case. Same: replies identical to those from text. Tokens
and seconds are medians per question; banks answer every second question.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from rich.progress import track

from benchmarks import common
from kp_core import ChromaFactStore, Fact, PackStore, Session
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, pack_place

__all__ = ["main", "run"]

_DEMO = Path(__file__).parents[1] / "cookbooks" / "demo"
_MAX_TOKENS, _FACTS, _BANK_EVERY, _NAMESPACE = 16, 3, 2, "demo"
# The documents come first in their message, so that what precedes them is the same in every call.
_PROMPT = ChatPromptTemplate([("human", "Context:\n{context}\n\nUsing the context, answer in a few words: {question}")])
_ALONE = ChatPromptTemplate([("human", "Answer in a few words: {question}")])
_question = RunnablePassthrough() | (lambda asked: asked["question"])
_FIELDS = ("prompt_tokens", "pack_tokens", "computed_tokens", "ttft_s")


@dataclass(frozen=True)
class Question:
    """A question, and the answers that count as right."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """A way of answering; `like` names the one it must agree with, `every` says which questions it is asked."""

    name: str
    chain: Runnable[object, AIMessage]
    like: str = ""
    every: int = 1


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_DEMO / name).read_text(encoding="utf-8").splitlines()]


def _join(documents: Sequence[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def _ways(engine: Session, facts: ChromaFactStore, folder: Path, questions: Sequence[Question]) -> tuple[Way, ...]:
    """The five chains; the KV of packs that a question finds first is stored, that of others is never read."""
    store = PackStore(folder)
    model = ChatKnowledgePacks(engine=engine, store=store, namespaces=[_NAMESPACE], max_tokens=_MAX_TOKENS)
    place = pack_place(_PROMPT)
    common_options = {"engine": engine, "store": store, "fact_store": facts, "namespace": _NAMESPACE}
    common_options |= {"compiled_for": place, "content": "handle", "kv": "lazy"}
    found = [
        Fact(row["text"], title=row["title"], source="Orrelay Isles", id=row["id"]) for row in _rows("facts.jsonl")
    ]
    single = KnowledgePackRetriever.from_facts(found, **common_options, k=_FACTS)
    banks = KnowledgePackRetriever.from_facts((), **common_options, k=1, unit="bank")
    asked = ((single, questions), (banks, questions[::_BANK_EVERY]))
    first = [retriever.invoke(each.text)[0].metadata["text"] for retriever, some in asked for each in some]
    for pack in engine.build_packs(list(dict.fromkeys(first)), namespace=_NAMESPACE, compiled_for=place):
        store.put(pack)

    def chain(retriever: KnowledgePackRetriever, content: str) -> Runnable[object, AIMessage]:
        retriever = retriever.model_copy(update={"content": content})
        return {"context": _question | retriever | _join, "question": _question} | _PROMPT | model

    return (
        Way("no knowledge", _ALONE | model),
        Way(f"text, {_FACTS} facts", chain(single, "text")),
        Way(f"packs, {_FACTS} facts", chain(single, "handle"), like=f"text, {_FACTS} facts"),
        Way("text, one bank", chain(banks, "text"), every=_BANK_EVERY),
        Way("packs, one bank", chain(banks, "handle"), like="text, one bank", every=_BANK_EVERY),
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    read = _rows("questions.jsonl")
    # Evenly spread, so that few of them are of all kinds.
    count = min(arguments.limit or len(read), len(read))
    chosen = [read[number * len(read) // count] for number in range(count)]
    questions = [Question(row["question"], (row["answer"], *row["aliases"])) for row in chosen]
    engine, rows, said = common.load_engine(arguments), list[dict[str, Any]](), dict[str, list[str]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        facts = stack.enter_context(ChromaFactStore(folder / "facts"))
        for way in _ways(engine, facts, folder / "packs", questions):
            asked, replies = questions[:: way.every], []
            for question in track(asked, way.name):
                engine.clear_cache()
                replies.append(way.chain.invoke({"question": question.text}))
            texts = said[way.name] = [reply.text for reply in replies]
            right = [
                any(common.contains(text, each) for each in q.answers) for q, text in zip(asked, texts, strict=True)
            ]
            usages = [reply.response_metadata["kp"] for reply in replies]
            same = sum(map(str.__eq__, texts, said[way.like])) if way.like else None
            medians = {name: statistics.median(usage[name] for usage in usages) for name in _FIELDS}
            rows.append({"way": way.name, "asked": len(asked), "right": common.mean(right), "same": same, **medians})
    return {"dtype": arguments.dtype, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    columns = ("way", "asked", "right", "same", "sent", "by pack", "computed", "first token, s")
    rows = [
        (row["way"], row["asked"], f"{row['right']:.0%}", "" if row["same"] is None else row["same"],
         *(f"{row[name]:.0f}" for name in _FIELDS[:3]), f"{row['ttft_s']:.2f}")
        for row in figures["rows"]
    ]  # fmt: skip
    common.show_table(f"Questions about the Orrelay Isles, {figures['dtype']}", columns, rows)
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
