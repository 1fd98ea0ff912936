"""`kp ask`: a model answers from a collection, one question or one after another."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kp_cli import waiting
from kp_cli.options import (
    MOST_FACTS,
    JsonFlag,
    ModelOptions,
    Namespace,
    Place,
    PlaceOptions,
    Where,
    existing,
    filter_of,
    spread,
)
from kp_cli.output import about_hit, console, plain, sourced, tell, warn
from kp_core import Generation, Message, Session
from kp_core.banks.compiling import Unit
from kp_core.banks.delivery import KV, Delivery, Found
from kp_core.errors import ContextOverflowError, FactError
from kp_core.packs.view import Mismatch
from kp_core.plan.composer import composer_of
from kp_core.steering import SteeringWarning, load_steering
from kp_methods.calibration import INSTRUCTION

_NOTHING = "none, as no fact passes the filter"


@dataclass(frozen=True)
class _AskOptions(ModelOptions, PlaceOptions):
    """Options for facts, for packs and for the model."""

    where: Where = None
    namespace: Namespace = None
    unit: Annotated[Unit, typer.Option(help="What a pack holds.")] = "fact"
    kv: Annotated[KV | None, typer.Option(help="Whether packs store KV. Default: if the engine gives it.")] = None
    composer: Annotated[
        str, typer.Option(metavar="NAME", help="How several packs are answered: exact, select, auto, splice, packet.")
    ] = "exact"
    mismatch: Annotated[Mismatch, typer.Option(help="What to do with a pack of another model or dtype.")] = "error"
    steering: Annotated[Path | None, typer.Option(help="Answer with this steering, a file of `kp steer make`.")] = None
    alpha: Annotated[float | None, typer.Option(help="Strength of --steering; default: calibrated, or 0.7.")] = None

    def asked(self) -> dict[str, Any]:
        """These options as options of a request."""
        if self.steering is None and self.alpha is not None:
            raise typer.BadParameter("--alpha goes with --steering.")
        steering = None if self.steering is None else load_steering(existing(self.steering))
        # Of all warnings of Python, the command line shows this one.
        warnings.simplefilter("default", SteeringWarning)
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
        return {
            "composer": composer_of(self.composer),
            "mismatch": self.mismatch,
            "steering": steering and (steering, self.alpha),
            "scope": "last_token" if steering and steering.keys else None,  # A delta of keys fits one position.
        }


@spread
def ask(  # noqa: C901, PLR0913 - one parameter per option or group of options, and one loop
    place: Place,
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="What to answer. Without it: type one after another.")
    ] = None,
    *,
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=MOST_FACTS, help="How many facts per question.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    text: Annotated[bool, typer.Option("--text", help="Send the facts as text, as plain RAG does.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where the KV of each part of the prompt would come from; no answer.")
    ] = False,
    options: _AskOptions,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question from a collection: the answer as it comes, its sources, and what it cost.

    Without a question it is a conversation: an empty line or Ctrl-D ends it, Ctrl-C the current answer. Facts are
    searched with what you type alone, so name what you ask about, also in a second question.
    """
    if question is None and (text or explain or as_json):
        raise typer.BadParameter("--text, --explain and --json go with a QUESTION.")
    # Check the options before loading a model, which may take minutes.
    where, request = filter_of(options.where), {"max_tokens": max_tokens, "reuse": not text, **options.asked()}
    out, messages, namespaces = console(), list[Message](), {options.namespace or "default"}
    with ExitStack() as stack:
        session, packs = _opened(stack, place, options, lazy=explain)
        if question is not None and packs.kv == "stored":
            request["keep"] = "always"  # For the next process; this one reads nothing twice.
        for asked in iter(partial(_typed, out), "") if question is None else [question]:
            try:
                began = time.perf_counter()
                with waiting("Finding facts and compiling their packs"):
                    results = packs.search(asked, k, where=where, namespace=options.namespace)
                found_s = time.perf_counter() - began
                namespaces |= {result.unit.namespace for result in results}
                request["view"] = packs.store.view(*namespaces)
                parts = [result.unit.text if text else result.content for result in results]
                content = "\n".join(parts) + f"\n\n{INSTRUCTION}\nQuestion: {asked}"
                conversation: list[Message] = [*messages, {"role": "user", "content": content}]
                if explain:
                    break
                generation = _answer(session, conversation, request, live=not as_json)
            except KeyboardInterrupt:
                if question is not None:
                    raise
                out.print("\n(stopped; this question is forgotten)\n", style="dim")
                continue
            if question is None:
                messages = [*conversation, {"role": "assistant", "content": generation.text}]
                names = ", ".join(dict.fromkeys(map(_name, results))) or _NOTHING
                out.print(f"from {names}\n{_usage(generation, found_s)}\n", style="dim")
    if question is None:
        return
    sources = [about_hit(result.hit, result.unit.text, result.handle) for result in results]
    report: dict[str, Any] = {"question": question, "sources": sources}
    if explain:
        plan = session.explain(conversation, **request)
        tell({**report, "plan": plan.to_dict()}, str(plan), as_json=as_json)
        return
    answer = {"text": generation.text, "finish_reason": generation.finish_reason, "usage": generation.usage.to_dict()}
    lines = ["\nSources:" if results else f"\nSources: {_NOTHING}."]
    for number, result in enumerate(results, 1):
        lines.append(f"  {number}. {_name(result)}  ({result.hit.score:.3f}, {result.handle or 'as text'})")
    lines.append(_usage(generation, found_s))
    report |= {"found_s": found_s, "answers": {"text" if text else "packs": answer}}
    tell(report, "\n".join(lines), as_json=as_json)


def _opened(stack: ExitStack, place: str, options: _AskOptions, *, lazy: bool) -> tuple[Session, Delivery]:
    """A model, and a collection with its packs (without KV if `lazy`), open until `stack` closes."""
    with waiting("Opening the collection"):
        # Banks are made on first use, which writes to the collection.
        facts = stack.enter_context(options.open(place, read_only=options.unit != "bank"))
        if not len(facts):
            facts.search("anything")
        if options.namespace not in (None, *(known := facts.namespaces())):
            raise FactError(f"There is no fact of the namespace {options.namespace!r}; expected {', '.join(known)}.")
    session = options.load()
    kv: KV = options.kv or ("stored" if "kv" in session.supports else "lazy")
    folder = options.noted_folder(place, facts)
    return session, Delivery(facts, session, folder, unit=options.unit, kv="lazy" if lazy else kv)


def _answer(session: Session, messages: list[Message], request: Mapping[str, Any], *, live: bool) -> Generation:
    """Answer the last message, printed piece by piece if `live`. Drops the oldest while the model cannot read all."""
    while True:
        try:
            with closing(session.stream(messages, **request)) as stream:
                with waiting("Reading the prompt"):
                    piece = next(stream, "")
                while live and piece:
                    sys.stdout.write(plain(piece))
                    sys.stdout.flush()
                    piece = next(stream, "")
                if live:
                    sys.stdout.write("\n")
                return stream.result()
        except ContextOverflowError:
            if len(messages) == 1:
                raise
            del messages[:2]  # A question and its answer.
            console().print("(the model can read no more; the oldest question is forgotten)", style="dim")


def _typed(out: Console) -> str:
    """The next question; empty when the input ends."""
    try:
        return out.input(Text("you: ", "bold")).strip()
    except (EOFError, KeyboardInterrupt):
        out.print()
        return ""


def _name(result: Found) -> str:
    fact = result.hit.fact
    return " · ".join(part for part in (fact.title, sourced(fact)) if part) or fact.text[:60]


def _usage(generation: Generation, found_s: float) -> str:
    """What an answer cost, for whoever waited for it: `found_s` went by before the model was asked."""
    usage = generation.usage
    note = f" ({usage.approximate_tokens} approximate)" if usage.approximate_tokens else ""
    note += f", {usage.unread_packs} packs not read" if usage.unread_packs else ""
    return (
        f"sent {usage.prompt_tokens} tokens, packs delivered {usage.pack_tokens}{note}; {usage.reused_tokens} reused, "
        f"{usage.computed_tokens} computed; {usage.completion_tokens} generated\n"
        f"first token {found_s + usage.ttft_s:.2f} s after the question, {found_s:.2f} s of them for facts and packs"
        + (f"\ncomposer: {usage.choice}" if usage.choice else "")
    )
