"""What does each step of a LangChain agent cost, is what it says right, and does it call and repeat as it should?

Each conversation has `--steps` questions about an invented world (`benchmarks.questions`). To each the model calls
`search`, which gives `--packs` passages of about `--tokens` tokens, one of which has the answer, and answers. The call
is forced, as a small model would stop or repeat itself; with `--free` the model decides. Several agents on one engine,
with nothing in memory before each:

- text: the tool returns the passages; the prefix tree reuses what it can. It stops at the model's window.
- none: as text, with nothing kept between calls, as engines without a prefix cache do it.
- packs: the tool returns handles, and `KnowledgePackMiddleware` bounds the prompt.
- select: as packs, with `memory="search"` and `composer="select:packs=1"`.

Of a step, all its calls together: `sent` are prompt tokens outside packs, of the last call, `read` all of that prompt,
`computed` tokens prefilled, `first` seconds until the first tokens, with the search in memory, `whole` those to the
end, `cpu` seconds of processor time. `again` is one more question, answered behind the conversation in a process of its
own.

`right`: answers that hold the fact, with the 95 % interval (Wilson); `old` and `new` are those to the `--asked` first
and last questions, put once more behind the conversation; `alone` those behind the passage with the fact and nothing
else. `valid`: steps whose first answer is a valid call. `repeats`: steps with three identical calls in a row. `same`:
answers and calls that equal the text agent's.

With `--json OUT`, each step is written to OUT with the ending `.jsonl`, its packs to a folder beside it, and the same
command goes on there. `--head` fills the tool schemas up to so many tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelCallLimitMiddleware,
    ModelRequest,
    ModelResponse,
    wrap_model_call,
)
from langchain_core.messages import AIMessage, HumanMessage, messages_from_dict, messages_to_dict
from langchain_core.tools import tool
from rich.progress import track
from scipy.stats import binomtest

from benchmarks import common
from benchmarks.answers import read_log
from benchmarks.questions import Question, questions
from kp_core import ChromaFactStore, Fact, PackStore, Session
from kp_core.banks.compiling import compile_facts
from kp_core.errors import ContextOverflowError
from kp_langchain import ChatKnowledgePacks
from kp_langchain.middleware import KnowledgePackMiddleware

__all__ = ["AGENTS", "main", "run"]

AGENTS = ("text", "none", "packs", "select")
_SHOWN = (*(1, 2, 3, 5, 10, 15), *range(20, 1001, 20))
_ANSWER, _CALLS, _REPEATS = 40, 6, 3
_COSTS = ("sent", "read", "computed", "first", "whole", "cpu")
_NAMESPACE = "read"
_SYSTEM = "Answer in a few words, from what the tool `search` finds."


class _Steps(AgentMiddleware[Any, Any, Any]):
    """Has the model call or answer, and adds up what its calls cost, from where `begin`, in front, sees them."""

    def __init__(self, *, reuse: bool, answer: int) -> None:
        super().__init__()
        self._reuse, self._answer, self._began = reuse, answer, (0.0, 0.0)
        self.choice, self.record = "auto", dict[str, float]()

    def begin(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:  # noqa: ANN401
        self._began = time.perf_counter(), time.process_time()
        return handler(request)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        choice, is_answer = self.choice, request.messages[-1].type == "tool"
        settings, sent = {**request.model_settings, "reuse": self._reuse}, time.perf_counter()
        if is_answer:
            settings["max_tokens"], choice = self._answer, "none" if choice == "search" else choice
        response = handler(request.override(tool_choice=choice, model_settings=settings))
        usage, (began, cpu) = response.result[0].response_metadata["kp"], self._began
        costs = {
            "computed": usage["computed_tokens"],
            "first": sent - began + usage["ttft_s"],
            "whole": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
        }
        self.record |= {name: self.record.get(name, 0) + cost for name, cost in costs.items()}
        self.record |= {"sent": usage["prompt_tokens"], "read": usage["prompt_tokens"] + usage["pack_tokens"]}
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        raise NotImplementedError


class _Agent:
    """The agent `name`, whose packs and facts are in `folder`."""

    def __init__(self, name: str, engine: Session, folder: Path, arguments: argparse.Namespace) -> None:
        options: dict[str, Any] = {"keep": "never"}
        self._steps, self._found, self.is_new = _Steps(reuse=name != "none", answer=arguments.answer), "", True
        middleware: list[Any] = [wrap_model_call(self._steps.begin), ModelCallLimitMiddleware(run_limit=_CALLS)]
        self._store = PackStore(folder / "packs") if name in ("packs", "select") else None
        if self._store is not None:
            options = {"store": self._store, "namespaces": [_NAMESPACE, name], "keep_in": name}
            memory: dict[str, Any] = {"memory_tokens": arguments.memory_tokens or 0.75}
            if name == "select":
                options["composer"] = "select:packs=1"
                memory |= {"memory": "search", "facts": ChromaFactStore(folder / "facts", read_only=True)}
            middleware.append(KnowledgePackMiddleware(**memory))

        @tool
        def search(query: str) -> str:  # noqa: ARG001 - what is asked gives the same, whatever the words
            """Search for what is known about towns and harbours."""
            return self._found

        model = ChatKnowledgePacks(engine=engine, max_tokens=_ANSWER, **options)
        tools: list[Any] = [search, *_schemas(model, arguments.head)]
        self._agent: Any = create_agent(model, tools, system_prompt=_SYSTEM, middleware=[*middleware, self._steps])

    def ask(self, messages: Sequence[Any], question: Question, choice: str) -> dict[str, Any]:
        """The record of `question` behind `messages`; `{}` where it no longer fits the model's window."""
        texts: Sequence[object] = question.documents
        if self._store is not None:
            texts = [self._store.handle(text, _NAMESPACE) for text in question.documents]
        self._found, self._steps.choice, self._steps.record = "\n\n".join(map(str, texts)), choice, {}
        self.is_new = False
        try:
            state = self._agent.invoke({"messages": [*messages, HumanMessage(question.asked)]})
        except ContextOverflowError:
            return {}
        new = state["messages"][len(messages) :]
        answers = [message for message in new if isinstance(message, AIMessage)]
        calls = [[[call["name"], call["args"]] for call in answer.tool_calls] for answer in answers]
        return self._steps.record | {
            "messages": messages_to_dict(new),
            "said": answers[-1].text,
            "calls": calls,
            "right": common.contains(answers[-1].text, question.answer),
            "valid": bool(calls[0]) and all(name == "search" for name, _ in calls[0]),
            "repeats": any(call and calls[at : at + _REPEATS] == [call] * _REPEATS for at, call in enumerate(calls)),
        }


def _schemas(model: ChatKnowledgePacks, head: int) -> list[dict[str, Any]]:
    """Schemas of tools that nobody calls, so that the head of the prompt has at least `head` tokens."""
    tools: list[dict[str, Any]] = []
    while head and model.get_num_tokens_from_messages([HumanMessage("?")], tools) < head:
        about = f"Read or change register {len(tools)} of the harbour office, which the town keeps for its ships."
        fields = {
            name: {
                "type": "string",
                "description": f"The {name} of the entry in register {len(tools)}, if it is known.",
            }
            for name in ("ship", "captain", "cargo", "day")
        }
        schema = {"type": "object", "properties": fields, "required": ["ship"]}
        function = {"name": f"register_{len(tools)}", "description": about, "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools


def _follow(
    agent: _Agent,
    asked: Sequence[Question],
    arguments: argparse.Namespace,
    once: Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]],
    again: Callable[[list[Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The records of `agent` in one conversation. `once` gives one by its name, `again` that of another process."""
    messages, steps = list[Any](), list[dict[str, Any]]()
    for at in range(len(asked)):
        choice = "auto" if arguments.free else "search"
        step = once(f"step {at}", partial(_step, agent, asked[: at + 1], messages, steps, choice))
        if not step:
            break
        messages = [*messages, *messages_from_dict(step["messages"])]
        steps.append(step)
    records: dict[str, Any] = {"steps": steps}
    for which, some in _once_more(asked, arguments).items():
        records[which] = [
            once(f"{which} {at}", partial(agent.ask, messages, question, "none")) for at, question in enumerate(some)
        ]
    return records | {"again": once("again", partial(again, messages_to_dict(messages)))}


def _step(
    agent: _Agent, asked: Sequence[Question], messages: list[Any], steps: Sequence[Mapping[str, Any]], choice: str
) -> dict[str, Any]:
    """The record of the last of `asked`, with in memory what the step before left, also where a run goes on."""
    if steps and agent.is_new:
        agent.ask(messages[: -len(steps[-1]["messages"])], asked[-2], choice)
    return agent.ask(messages, asked[-1], choice)


def _once_more(asked: Sequence[Question], arguments: argparse.Namespace) -> dict[str, Sequence[Question]]:
    """The first and the last questions of a conversation."""
    return {"old": asked[: arguments.asked], "new": asked[len(asked) - arguments.asked :]}


def _again(name: str, folder: Path, arguments: argparse.Namespace, said: list[Any], question: Question) -> Any:  # noqa: ANN401
    """The record of `question`, asked in a process of its own behind what was said."""
    engine = common.load_engine(arguments)
    common.reset(engine)
    return _Agent(name, engine, folder, arguments).ask(messages_from_dict(said), question, "none")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All records. Writes each to the file beside `--json`, and takes from there what is done."""
    engine = common.load_engine(arguments)

    def encode(text: str) -> Sequence[int]:
        return list(engine.tokenizer.encode(text, add_special_tokens=False))

    stream = questions("world", arguments.packs, arguments.tokens, encode, arguments.seed)
    log = arguments.json and arguments.json.with_suffix(".jsonl")
    settings = "steps packs tokens head memory_tokens asked answer free dtype model seed"
    cell = json.dumps({name: str(getattr(arguments, name)) for name in settings.split()})
    done = {key: line["record"] for key, line in read_log(log).get(cell, {}).items()} if log else {}

    def once(key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in done:
            done[key] = make()
            if log:
                with log.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"cell": cell, "number": key, "record": done[key]}) + "\n")
        record: dict[str, Any] = done[key]
        return record

    def alone(question: Question) -> dict[str, Any]:
        [gold, *_] = [text for text in question.documents if common.contains(text, question.answer)]
        said = engine.generate(common.prompt([gold], question.asked), max_tokens=_ANSWER).text
        return {"right": common.contains(said, question.answer)}

    conversations, context = list[dict[str, Any]](), get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.agent"])  # Their imports are made once.
    with (
        common.scratch(engine) as scratch,
        ProcessPoolExecutor(1, context, max_tasks_per_child=1) as others,
    ):
        place = Path(scratch) if log is None else log.with_suffix(".packs")
        for number in range(arguments.limit):
            *asked, last = islice(stream, arguments.steps + 1)
            folder, agents = place / str(number), dict[str, Any]()
            facts = [Fact(text, namespace=_NAMESPACE) for question in asked for text in question.documents]
            with ChromaFactStore(folder / "facts") as stored:
                stored.add(facts)
            compile_facts(facts, engine, PackStore(folder / "packs"))
            for name in track(arguments.agents, f"Conversation {number + 1} of {arguments.limit}"):
                engine.clear_cache()  # Building leaves KV behind.

                def again(said: list[Any], name: str = name, folder: Path = folder, last: Question = last) -> Any:  # noqa: ANN401
                    engine.when_idle(lambda: None).result()
                    return others.submit(_again, name, folder, arguments, said, last).result()

                def mine(what: str, make: Callable[[], Any], of: str = f"{number} {name}") -> dict[str, Any]:
                    return once(f"{of} {what}", make)

                agent = _Agent(name, engine, folder, arguments)
                agents[name] = _follow(agent, asked, arguments, mine, again)
            repeated = [question for some in _once_more(asked, arguments).values() for question in some]
            agents["alone"] = [once(f"{number} alone {at}", partial(alone, each)) for at, each in enumerate(repeated)]
            conversations.append(agents)
    figures = {"dtype": arguments.dtype, "conversations": conversations}
    common.write_json(arguments.json, figures)
    return figures


def _share(records: Sequence[Mapping[str, Any]], name: str = "right") -> str:
    """How many of the records have `name`, with the 95 % interval of their share."""
    if not records:
        return "-"
    count = sum(record[name] for record in records)
    interval = binomtest(count, len(records)).proportion_ci(method="wilson")
    return f"{count} of {len(records)} ({interval.low:.2f}-{interval.high:.2f})"


def _costs(records: Sequence[Mapping[str, Any]]) -> list[float | str]:
    """The median of each cost."""
    found = [record for record in records if record]
    return [statistics.median(record[cost] for record in found) if found else "-" for cost in _COSTS]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the tables, write the JSON file."""
    parser = common.argument_parser(__doc__, "")
    parser.set_defaults(limit=1)
    parser.add_argument("--agents", nargs="+", default=AGENTS, choices=AGENTS, help="default: all")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="questions; default: %(default)s")
    parser.add_argument("--packs", type=int, default=1, metavar="N", help="passages of a search; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=130, metavar="N", help="of a passage; default: %(default)s")
    parser.add_argument("--head", type=int, default=0, metavar="N", help="tokens of tool schemas; default: few")
    parser.add_argument("--memory-tokens", type=int, metavar="N", help="of the middleware; default: its own")
    parser.add_argument("--asked", type=int, default=0, metavar="N", help="questions put again; default: %(default)s")
    parser.add_argument("--answer", type=int, default=_ANSWER, metavar="N", help="most tokens; default: %(default)s")
    parser.add_argument("--free", action="store_true", help="the model decides what it calls")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the world; default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    conversations = figures["conversations"]
    rows, scores = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    for name in arguments.agents:
        mine = [conversation[name] for conversation in conversations]
        steps = [step for one in mine for step in one["steps"]]
        at_step = {at: [one["steps"][at - 1] for one in mine if len(one["steps"]) >= at] for at in _SHOWN}
        rows += [(str(at), name, *_costs(reached)) for at, reached in at_step.items() if reached]
        rows.append(("again", name, *_costs([one["again"] for one in mine])))
        same = "-"
        if "text" in arguments.agents:
            pairs = [
                (step["said"], step["calls"]) == (text["said"], text["calls"])
                for one in conversations
                for step, text in zip(one[name]["steps"], one["text"]["steps"], strict=False)
            ]
            same = f"{sum(pairs)} of {len(pairs)}"
        repeated = [_share([record for one in mine for record in one[which] if record]) for which in ("old", "new")]
        valid, repeats = (sum(step[what] for step in steps) for what in ("valid", "repeats"))
        scores.append((name, _share(steps), valid, repeats, same, *repeated))
    scores.append(("alone", *["-"] * 4, _share([record for one in conversations for record in one["alone"]]), "-"))
    about = f"{arguments.packs} passages of {arguments.tokens} tokens a step, {figures['dtype']}"
    common.show_table(f"LangChain agents, {arguments.steps} steps, {about}", ("step", "agent", *_COSTS), rows)
    common.show_table("Answers", ("agent", "right", "valid", "repeats", "same", "old", "new"), scores)
    return figures


if __name__ == "__main__":
    main()
