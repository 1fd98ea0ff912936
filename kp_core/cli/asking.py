"""`kp ask`, `kp chat`: a model answers from what a bank finds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from kp_core import Generation, Message, PackStore, load_engine
from kp_core.cli.shared import (
    BankPath,
    InNamespace,
    JsonFlag,
    LexicalFlag,
    ModelName,
    Where,
    console,
    filter_of,
    open_bank,
    print_json,
)
from kp_core.delivery import KV, BankPacks, Found, Unit
from kp_core.engines.session import Session
from kp_core.errors import ContextOverflowError
from kp_core.facts import LexicalReranker
from kp_core.steering import AskedSteering, load_steering

__all__ = ["ask", "chat"]

_NOTHING = "none, as no fact passes the filter"
_INSTRUCTION = "Answer the question with a few words, using the facts."

_Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the best of this machine.")]
_MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
_UnitOption = Annotated[str, typer.Option("--unit", help="What a pack holds: fact, bank or document.")]
_SteeringOption = Annotated[
    Path | None, typer.Option("--steering", metavar="FILE", help="Speak as a steering of `kp steer make` says.")
]
_AlphaOption = Annotated[
    float | None, typer.Option(help="How strongly; default: as calibrated, else 0.7. Goes with --steering.")
]
_KVOption = Annotated[str, typer.Option("--kv", help="stored, lazy, or auto: whichever is faster on this machine.")]


def ask(  # noqa: PLR0913 - one parameter per option
    bank: BankPath,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to answer.")],
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="How many facts.")] = 3,
    text: Annotated[bool, typer.Option("--text", help="Send the facts as text, as plain RAG does.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Answer from packs and from text, side by side.")] = False,
    unit: _UnitOption = "fact",
    kv: _KVOption = "lazy",
    where: Where = None,
    namespace: InNamespace = None,
    lexical: LexicalFlag = False,
    model: ModelName = None,
    dtype: _Dtype = None,
    max_tokens: _MaxTokens = 64,
    steering: _SteeringOption = None,
    alpha: _AlphaOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question from a bank: the answer as it comes, its sources, and what it cost."""
    if compare and steering is not None:
        raise typer.BadParameter("--compare shows that packs and text say the same; --steering steers packs, not text.")
    wanted, rerank = filter_of(where), LexicalReranker() if lexical else None
    with ExitStack() as stack:
        asker = _Asker(stack, bank, model, dtype, unit, kv, _steering(steering, alpha))
        found = asker.packs.search(question, k, where=wanted, namespace=namespace, rerank=rerank)
        ways = ("packs", "text") if compare else ("text" if text else "packs",)
        live = not (as_json or compare)
        answers = {way: asker.answer(question, found, way, max_tokens, live=live) for way in ways}
    if as_json:
        print_json(
            {
                "question": question,
                "sources": [_source(each) for each in found],
                "answers": {way: _answer(generation) for way, generation in answers.items()},
                **(_comparison(answers) if compare else {}),
            }
        )
        return
    out = console()
    if compare:
        out.print(Columns([Panel(each.text, title=way, width=56) for way, each in answers.items()]))
        for way, each in answers.items():
            out.print(f"{way}: {_usage(each)}")
        about = _comparison(answers)
        prompts = "the same prompt" if about["same_prompt"] else "another prompt"
        out.print(
            f"The model read {prompts} both times; the answers are {'the same' if about['same'] else 'not the same'}."
        )
        if about["same_prompt"] and not about["same"]:
            out.print(
                "A text is prefilled in one piece and packs one by one, which rounds otherwise in "
                f"{asker.engine.fingerprint.dtype}; --dtype float32 rounds too little to matter."
            )
    _show_sources(found)
    if not compare:
        out.print(_usage(next(iter(answers.values()))))


def chat(  # noqa: PLR0913 - one parameter per option
    bank: BankPath,
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="How many facts per question.")] = 3,
    unit: _UnitOption = "fact",
    kv: _KVOption = "lazy",
    where: Where = None,
    namespace: InNamespace = None,
    lexical: LexicalFlag = False,
    model: ModelName = None,
    dtype: _Dtype = None,
    max_tokens: _MaxTokens = 128,
    steering: _SteeringOption = None,
    alpha: _AlphaOption = None,
) -> None:
    """Talk with a model about a bank. An empty line or Ctrl-D ends it, Ctrl-C an answer that is being written."""
    wanted, rerank = filter_of(where), LexicalReranker() if lexical else None
    with ExitStack() as stack:
        asker = _Asker(stack, bank, model, dtype, unit, kv, _steering(steering, alpha))
        out, messages = console(), list[Message]()
        while question := _typed(out):
            try:
                found = asker.packs.search(question, k, where=wanted, namespace=namespace, rerank=rerank)
                asked: list[Message] = [*messages, {"role": "user", "content": _content(question, found, "packs")}]
                generation = asker.converse(asked, max_tokens)
            except KeyboardInterrupt:
                out.print("\n(stopped; this question is forgotten)\n", style="dim")
                continue
            messages = [*asked, {"role": "assistant", "content": generation.text}]
            names = ", ".join(dict.fromkeys(_name(each) for each in found)) or _NOTHING
            out.print(f"from {names}\n{_usage(generation)}\n", style="dim", soft_wrap=True)


class _Asker:
    """A bank, its packs and a model, for as long as `stack` is open."""

    def __init__(  # noqa: PLR0913
        self,
        stack: ExitStack,
        bank: Path,
        model: str | None,
        dtype: str | None,
        unit: str,
        kv: str,
        steering: AskedSteering | None,
    ) -> None:
        self.steering = steering
        opened = stack.enter_context(open_bank(bank, read_only=True))
        # What the question costs to embed is known before minutes go into loading a model.
        if not len(opened):
            opened.route("anything")
        self.engine: Session = load_engine(model, **({} if dtype is None else {"dtype": dtype}))
        self.store = PackStore(bank / "packs")
        self.packs = BankPacks(opened, self.engine, self.store, unit=_unit(unit), kv=_kv(kv))
        self.view = self.store.view(*dict.fromkeys(fact.namespace for fact in opened.facts()))

    def answer(self, question: str, found: list[Found], way: str, max_tokens: int, *, live: bool) -> Generation:
        """One question, with its facts as packs or as text."""
        messages: list[Message] = [{"role": "user", "content": _content(question, found, way)}]
        return self.stream(messages, max_tokens, live=live, reuse=way == "packs")

    def converse(self, messages: list[Message], max_tokens: int) -> Generation:
        """The answer to the last of `messages`; the first are dropped while all are more than the model can read."""
        while True:
            try:
                return self.stream(messages, max_tokens, live=True)
            except ContextOverflowError:
                if len(messages) == 1:
                    raise
                # A question and its answer.
                del messages[:2]
                console().print("(the model can read no more; the oldest question is forgotten)", style="dim")

    def stream(self, messages: list[Message], max_tokens: int, *, live: bool, reuse: bool = True) -> Generation:
        """An answer, printed piece by piece where it is `live`."""
        with closing(
            self.engine.stream(messages, view=self.view, max_tokens=max_tokens, reuse=reuse, steering=self.steering)
        ) as stream:
            for piece in stream:
                if live:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            if live:
                sys.stdout.write("\n")
            return stream.result()


def _typed(out: Console) -> str:
    """The next question; none when the input ends."""
    try:
        return out.input(Text("you: ", "bold")).strip()
    except (EOFError, KeyboardInterrupt):
        out.print()
        return ""


def _content(question: str, found: list[Found], way: str) -> str:
    parts = [str(each.handle) if way == "packs" else each.text for each in found]
    return "\n".join(parts) + f"\n\n{_INSTRUCTION}\nQuestion: {question}"


def _comparison(answers: Mapping[str, Generation]) -> dict[str, bool]:
    prompts = {each.prompt.token_ids for each in answers.values()}
    return {"same_prompt": len(prompts) == 1, "same": len({each.text for each in answers.values()}) == 1}


def _show_sources(found: list[Found]) -> None:
    out = console()
    out.print("\nSources:" if found else f"\nSources: {_NOTHING}.")
    for place, each in enumerate(found, 1):
        out.print(f"  {place}. {_name(each)}  ({each.hit.score:.3f}, {each.handle})", soft_wrap=True)


def _name(found: Found) -> str:
    fact = found.hit.fact
    return " · ".join(part for part in (fact.title, fact.source) if part) or fact.text[:60]


def _usage(generation: Generation) -> str:
    usage = generation.usage
    return (
        f"sent {usage.prompt_tokens} tokens, packs delivered {usage.pack_tokens}; {usage.reused_tokens} reused, "
        f"{usage.computed_tokens} computed; {usage.completion_tokens} generated, first after {usage.ttft_s:.2f} s"
    )


def _source(found: Found) -> dict[str, Any]:
    fact = found.hit.fact
    return {
        "id": fact.id,
        "handle": str(found.handle),
        "title": fact.title,
        "source": fact.source,
        "score": found.hit.score,
        "bank": found.hit.bank,
        "text": found.text,
    }


def _answer(generation: Generation) -> dict[str, Any]:
    return {"text": generation.text, "finish_reason": generation.finish_reason, "usage": generation.usage.to_dict()}


def _steering(path: Path | None, alpha: float | None) -> AskedSteering | None:
    if path is None and alpha is not None:
        raise typer.BadParameter("--alpha goes with --steering.")
    return None if path is None else (load_steering(path), alpha)


def _unit(name: str) -> Unit:
    units: dict[str, Unit] = {"fact": "fact", "bank": "bank", "document": "document"}
    if name not in units:
        raise typer.BadParameter(f"Got --unit {name}; expected {', '.join(units)}.")
    return units[name]


def _kv(name: str) -> KV:
    kinds: dict[str, KV] = {"stored": "stored", "lazy": "lazy", "auto": "auto"}
    if name not in kinds:
        raise typer.BadParameter(f"Got --kv {name}; expected {', '.join(kinds)}.")
    return kinds[name]
