"""`kp ask`, `kp chat`: a model answers from a collection."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from kp_cli.shared import (
    JsonFlag,
    ModelOptions,
    Place,
    ReadOptions,
    SearchOptions,
    about_hit,
    console,
    plain,
    print_json,
    sourced,
    spread,
    tell,
)
from kp_core import Generation, Message, PackStore
from kp_core.compose import composer_of
from kp_core.delivery import KV, Delivery, Found, Unit
from kp_core.engines.request import Mismatch, Order
from kp_core.errors import ContextOverflowError
from kp_core.steering import load_steering

__all__ = ["ask", "chat"]

_NOTHING = "none, as no fact passes the filter"
_INSTRUCTION = "Answer the question with a few words, using the facts."

_MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]


@dataclass(frozen=True)
class _AskOptions(SearchOptions, ModelOptions, ReadOptions):
    """Options for facts, for packs and for the model."""

    unit: Annotated[Unit, typer.Option(help="What a pack holds.")] = "fact"
    kv: Annotated[
        KV | None, typer.Option(help="Whether packs keep their KV. Default: stored; lazy where the engine gives none.")
    ] = None
    composer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Makes the KV of packs behind other packs: exact, or an approximation by name: splice, "
            "blend:r=0.15,rule=first (or deviation, attention), packet; naive is wrong, for measuring.",
        ),
    ] = "exact"
    order: Annotated[
        Order, typer.Option(help="Free: facts are sent in the order that leaves the fewest tokens to compute.")
    ] = "given"
    mismatch: Annotated[
        Mismatch, typer.Option(help="What to do with a pack of another model; accept: of other numerics only.")
    ] = "error"
    steering: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speak as a steering of `kp steer make` says.")
    ] = None
    alpha: Annotated[
        float | None, typer.Option(help="How strongly; default: as calibrated, else 0.7. Goes with --steering.")
    ] = None

    def asked(self) -> dict[str, Any]:
        """These options as options of a request."""
        if self.steering is None and self.alpha is not None:
            raise typer.BadParameter("--alpha goes with --steering.")
        steering = None if self.steering is None else (load_steering(self.steering), self.alpha)
        options = {"composer": composer_of(self.composer), "order": self.order}
        return options | {"mismatch": self.mismatch, "steering": steering}


@spread
def ask(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to answer.")],
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="How many facts.")] = 3,
    max_tokens: _MaxTokens = 64,
    text: Annotated[bool, typer.Option("--text", help="Send the facts as text, as plain RAG does.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Answer from packs and from text, side by side.")] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show where the KV of each part of the prompt would come from, and do not answer."
        ),
    ] = False,
    options: _AskOptions,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question from a collection: the answer as it comes, its sources, and what it cost."""
    if compare and options.steering is not None:
        raise typer.BadParameter("--compare shows that packs and text say the same; --steering steers packs, not text.")
    if compare and explain:
        raise typer.BadParameter("--explain shows one prompt: with packs, or with --text; leave out --compare.")
    with ExitStack() as stack:
        asker = _Asker(stack, place, options, max_tokens, lazy=explain, once=True)
        found_units = asker.search(question, k)
        sources = {
            "question": question,
            "sources": [about_hit(source.hit, source.unit.text, source.handle) for source in found_units],
        }
        ways = ("packs", "text") if compare else ("text" if text else "packs",)
        if explain:
            plan = asker.session.explain(**asker.request(question, found_units, ways[0]))
            tell({**sources, "plan": plan.to_dict()}, str(plan), as_json=as_json)
            return
        live = not (as_json or compare)
        answers = {way: asker.answer(asker.request(question, found_units, way), live=live) for way in ways}
    if as_json:
        report = {
            way: {"text": answer.text, "finish_reason": answer.finish_reason, "usage": answer.usage.to_dict()}
            for way, answer in answers.items()
        }
        print_json({**sources, "answers": report, **(_comparison(answers) if compare else {})})
        return
    out = console()
    if compare:
        _show_comparison(out, answers, asker.session.fingerprint.dtype)
    out.print("\nSources:" if found_units else f"\nSources: {_NOTHING}.")
    for number, result in enumerate(found_units, 1):
        out.print(
            f"  {number}. {_name(result)}  ({result.hit.score:.3f}, {result.handle or 'as text'})", soft_wrap=True
        )
    if not compare:
        generation = next(iter(answers.values()))
        out.print("\n".join(filter(None, (_usage(generation), asker.gain(generation)))))


@spread
def chat(
    place: Place,
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="How many facts per question.")] = 3,
    max_tokens: _MaxTokens = 128,
    options: _AskOptions,
) -> None:
    """Talk with a model about a collection. An empty line or Ctrl-D ends it, Ctrl-C an answer that is being written."""
    with ExitStack() as stack:
        asker = _Asker(stack, place, options, max_tokens)
        out, messages = console(), list[Message]()
        while question := _typed(out):
            try:
                results = asker.search(question, k)
                request = asker.request(question, results, "packs", messages)
                generation = asker.converse(request)
            except KeyboardInterrupt:
                out.print("\n(stopped; this question is forgotten)\n", style="dim")
                continue
            messages = [*request["messages"], {"role": "assistant", "content": generation.text}]
            names = ", ".join(dict.fromkeys(_name(result) for result in results)) or _NOTHING
            out.print(f"from {names}\n{_usage(generation)}\n", style="dim", soft_wrap=True)


class _Asker:
    """A collection, its packs and a model, open until `stack` closes.

    With `lazy`, packs are made without KV. `once` is for a process that answers one question.
    """

    def __init__(  # noqa: PLR0913 - what a command was given
        self,
        stack: ExitStack,
        place: str,
        options: _AskOptions,
        max_tokens: int,
        *,
        lazy: bool = False,
        once: bool = False,
    ) -> None:
        # Check the options before loading a model, which may take minutes.
        self._wanted, self._asked = options.keywords(), {"max_tokens": max_tokens, **options.asked()}
        # Banks are made on first use, which writes to the collection.
        facts = stack.enter_context(options.reading(place, read_only=options.unit != "bank"))
        if not len(facts):
            facts.search("anything")
        self.session = options.load()
        self._store, self._spaces = PackStore(options.folder(place, facts)), {options.namespace or "default"}
        default: KV = "stored" if "kv" in self.session.engine.supports else "lazy"
        self._packs = Delivery(
            facts,
            self.session,
            self._store,
            unit=options.unit,
            kv="lazy" if lazy else options.kv or default,
            accept=options.mismatch == "accept",
        )
        self._is_new = False
        if once and self._packs.kv == "stored":
            # Keep KV for the next process; this one reads nothing twice.
            self._asked["keep"] = "always"

    def search(self, question: str, k: int) -> list[Found]:
        """The `k` units that have the best facts, with their packs."""
        changes_before = self._store.changes
        results = self._packs.search(question, k, **self._wanted)
        self._is_new |= self._store.changes != changes_before
        self._spaces |= {result.unit.namespace for result in results}
        return results

    def request(
        self, question: str, found: list[Found], way: str, before: list[Message] | None = None
    ) -> dict[str, Any]:
        """Arguments of `Session.stream`: a question with its facts, as packs or as text, behind earlier messages."""
        parts = [result.content if way == "packs" else result.unit.text for result in found]
        content = "\n".join(parts) + f"\n\n{_INSTRUCTION}\nQuestion: {question}"
        messages: list[Message] = [*(before or ()), {"role": "user", "content": content}]
        return {"messages": messages, "reuse": way == "packs", "recognise": way == "packs", **self._asked} | {
            "view": self._store.view(*self._spaces)
        }

    def gain(self, made: Generation) -> str:
        """A sentence on what stored KV saved this answer, or will save the next."""
        usage = made.usage
        if not usage.pack_tokens or self._packs.kv == "lazy":
            return ""
        if self._is_new:
            return "New packs are stored now: a question that finds them again reads them, and computes less."
        return f"{usage.reused_tokens} tokens were read, not computed."

    def converse(self, request: dict[str, Any]) -> Generation:
        """Answer the last message. Drops the oldest messages while there are more than the model can read."""
        while True:
            try:
                return self.answer(request, live=True)
            except ContextOverflowError:
                if len(request["messages"]) == 1:
                    raise
                # A question and its answer.
                del request["messages"][:2]
                console().print("(the model can read no more; the oldest question is forgotten)", style="dim")

    def answer(self, request: dict[str, Any], *, live: bool) -> Generation:
        """An answer; with `live`, it is printed piece by piece."""
        with closing(self.session.stream(**request)) as stream:
            for piece in stream if live else ():
                sys.stdout.write(plain(piece))
                sys.stdout.flush()
            if live:
                sys.stdout.write("\n")
            return stream.result()


def _typed(out: Console) -> str:
    """The next question; empty when the input ends."""
    try:
        return out.input(Text("you: ", "bold")).strip()
    except (EOFError, KeyboardInterrupt):
        out.print()
        return ""


def _comparison(answers: Mapping[str, Generation]) -> dict[str, bool]:
    prompts = {generation.prompt.token_ids for generation in answers.values()}
    return {"same_prompt": len(prompts) == 1, "same": len({generation.text for generation in answers.values()}) == 1}


def _show_comparison(out: Console, answers: Mapping[str, Generation], dtype: str) -> None:
    comparison = _comparison(answers)
    out.print(Columns([Panel(answer.text, title=way, width=56) for way, answer in answers.items()]))
    for way, generation in answers.items():
        out.print(f"{way}: {_usage(generation)}")
    prompts = "the same prompt" if comparison["same_prompt"] else "another prompt"
    out.print(
        f"The model read {prompts} both times; the answers are {'the same' if comparison['same'] else 'not the same'}."
    )
    if comparison["same_prompt"] and not comparison["same"]:
        out.print(
            "A text is prefilled in one piece and packs one by one, which rounds differently in "
            f"{dtype}; --dtype float32 rounds too little to matter."
        )


def _name(found: Found) -> str:
    fact = found.hit.fact
    return " · ".join(part for part in (fact.title, sourced(fact)) if part) or fact.text[:60]


def _usage(generation: Generation) -> str:
    usage = generation.usage
    note = f" ({usage.approximate_tokens} approximate)" if usage.approximate_tokens else ""
    return (
        f"sent {usage.prompt_tokens} tokens, packs delivered {usage.pack_tokens}{note}; {usage.reused_tokens} reused, "
        f"{usage.computed_tokens} computed; {usage.completion_tokens} generated, first after {usage.ttft_s:.2f} s"
    )
