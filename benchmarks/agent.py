"""What does the twentieth step of a LangChain agent cost? Passages read one by one through a tool.

An agent of `create_agent` calls its only tool at every step and gets the next passage of the data; the choice is
forced, as a small model would stop or repeat itself. Three agents on one engine, the cache cleared before each:

- packs: the tool returns a handle, and `KnowledgePackMiddleware` bounds the prompt.
- text: the tool returns the passage; the prefix tree reuses what it can.
- none: as text, with nothing kept between calls, as engines without a prefix cache do it.

Sent: prompt tokens outside packs. Computed: tokens prefilled. First: seconds to the first token of the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelCallLimitMiddleware, ModelRequest, ModelResponse
from langchain_core.tools import tool
from rich.progress import track

from benchmarks import common
from kp_core import PackStore, Session
from kp_langchain import ChatKnowledgePacks
from kp_langchain.middleware import KnowledgePackMiddleware

__all__ = ["main", "run"]

_AGENTS = ("packs", "text", "none")
_SHOWN = (1, 2, 3, 5, 10, 15, 20)


class _Reading(AgentMiddleware[Any, Any, Any]):
    """Has the model call its tool, and notes what every call cost; with `keeps` false, nothing is kept between them."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self._keeps, self.usages = keeps, list[dict[str, Any]]()

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        settings = {**request.model_settings, "reuse": self._keeps}
        response = handler(request.override(tool_choice="any", model_settings=settings))
        self.usages.append(response.result[0].response_metadata["kp"])
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        raise NotImplementedError


def follow(engine: Session, store: PackStore, passages: Sequence[str], name: str) -> list[dict[str, Any]]:
    """The usage of every step of the agent `name`, which reads `passages`."""
    found = list(passages)
    if name == "packs":
        packs = engine.build_packs(passages, namespace="read", compiled_for="system", progress=False)
        found = [str(store.put(pack)) for pack in packs]
    left = iter(found)

    @tool
    def read_on() -> str:
        """Read the next passage."""
        return next(left)

    reading = _Reading(keeps=name != "none")
    middleware: list[AgentMiddleware[Any, Any, Any]] = [ModelCallLimitMiddleware(run_limit=len(passages)), reading]
    if name == "packs":
        middleware.insert(0, KnowledgePackMiddleware())
    model = ChatKnowledgePacks(engine=engine, store=store, namespaces="read", max_tokens=40)
    agent: Any = create_agent(model, [read_on], middleware=middleware)
    # Building leaves KV behind; each agent starts from the store.
    engine.clear_cache()
    agent.invoke({"messages": [("human", "Read all there is.")]}, {"recursion_limit": 10 * len(passages)})
    return reading.usages


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    passages = [str(passage) for passage in common.read_passages(arguments.data, arguments.steps)]
    engine = common.load_engine(arguments)
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        steps = {name: follow(engine, store, passages, name) for name in track(_AGENTS, "Agents")}
    return {"dtype": arguments.dtype, "steps": steps}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="model calls of each agent; default: 20")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    steps = figures["steps"]
    kinds = (("sent", "prompt_tokens"), ("computed", "computed_tokens"), ("first", "ttft_s"))
    common.show_table(
        f"LangChain agents, {arguments.steps} steps, {figures['dtype']}",
        ("step", *(f"{kind} {name}" for kind, _ in kinds for name in _AGENTS)),
        [
            (step, *(steps[name][step - 1][key] for _, key in kinds for name in _AGENTS))
            for step in _SHOWN
            if step <= arguments.steps
        ],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
