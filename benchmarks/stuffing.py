"""A stuffing chain of LangChain: documents carry text, and the model recognises the texts of packs in its prompt.

The same chain, with and without recognition, over the `--documents` passages nearest to a subject, in the order found:
a first question with nothing in the engine's memory, then a second question about the same documents. Packs were
compiled for where the first document stands. Medians over subjects; counts are means.

- sent: tokens of the messages; read: those of them that were read from the KV of packs; computed: those prefilled.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from rich.progress import track

from benchmarks import common
from kp_core import Fact, PackStore, SentenceTransformerEmbedder
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, pack_place

__all__ = ["main", "run"]

PROMPT = ChatPromptTemplate([("system", common.INSTRUCTION), ("human", "{context}\n\nQuestion: {question}")])
_QUESTIONS = ("What is said of {}?", "In which year does {} begin, and where?")
_COLUMNS = ("ttft_s", "prompt_tokens", "recognised_tokens", "computed_tokens")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    engine = common.load_engine(arguments)
    passages = common.read_passages(arguments.data, arguments.limit)
    facts = [Fact(passage.text, title=passage.title) for passage in passages]
    found: dict[tuple[bool, int], list[dict[str, float]]] = {}
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        retriever = KnowledgePackRetriever.from_facts(
            facts,
            engine=engine,
            store=store,
            embedder=SentenceTransformerEmbedder(),
            compiled_for=pack_place(PROMPT),
            k=arguments.documents,
        )
        for passage in track(passages[:: max(1, len(passages) // arguments.subjects)][: arguments.subjects], "Asking"):
            texts = "\n".join(document.page_content for document in retriever.invoke(passage.title))
            for recognise in (False, True):
                model = ChatKnowledgePacks(
                    engine=engine, store=store, namespaces=["default"], max_tokens=1, recognise=recognise
                )
                chain = RunnableLambda(lambda question, texts=texts: {"context": texts, "question": question})
                engine.clear_cache()
                for number, question in enumerate(_QUESTIONS):
                    answer = (chain | PROMPT | model).invoke(question.format(passage.title))
                    found.setdefault((recognise, number), []).append(answer.response_metadata["kp"])
    rows = [
        {
            "recognise": recognise,
            "question": number + 1,
            "ttft_s": statistics.median(usage["ttft_s"] for usage in usages),
            **{name: common.mean(usage[name] for usage in usages) for name in _COLUMNS[1:]},
        }
        for (recognise, number), usages in sorted(found.items())
    ]
    return {"dtype": arguments.dtype, "documents": arguments.documents, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--documents", type=int, default=4, metavar="K", help="in a prompt; default: %(default)s")
    parser.add_argument("--subjects", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.set_defaults(limit=400)
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    common.show_table(
        f"A stuffing chain with {arguments.documents} documents, {arguments.dtype}",
        ("recognition", "question", "first token s", "sent", "read from packs", "computed"),
        [
            (
                "on" if row["recognise"] else "off",
                row["question"],
                row["ttft_s"],
                *(f"{row[name]:.0f}" for name in _COLUMNS[1:]),
            )
            for row in figures["rows"]
        ],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
