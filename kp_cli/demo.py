"""`kp demo`: what packs do, on one screen in a minute, with the bundled model and facts about invented islands."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kp_cli import waiting
from kp_cli.shared import ModelOptions, console, spread

if TYPE_CHECKING:
    from kp_core import Generation, PackStore, Session

__all__ = ["demo"]

_TOKENS = (250, 1000, 4000)
_SEARCHES, _FOUND = 8, 120  # Number of the agent's searches, and about how many tokens each finds.
_QUESTION = "What is the name of the highest peak on Thranmoor?"
_STYLED = "What is the sun?"
_ALPHAS = {-1.0: "casual", 0.0: "as it is", 1.5: "formal"}
_NEXT = """
What to try next
  kp build notes FOLDER   your own files: PDF, Word, Markdown, HTML, text
  kp ask notes QUESTION   its packs are compiled by the first question that needs them
  kp ask notes            go on asking
  kp --help               all else; README.md has LangChain, LlamaIndex, Python
"""


@spread
def demo(*, model: ModelOptions) -> None:
    """See in a minute what packs do: the same answer, sooner, at a prompt that does not grow, in a style of its own."""
    from kp_cli.sources import read_facts
    from kp_core import PackStore

    began, out = time.perf_counter(), console()
    out.print("Knowledge Packs: text is read once, and then only named.", style="bold")
    facts = [fact.text for fact in read_facts(Path(__file__).with_name("isles.jsonl"))]
    with ExitStack() as stack:
        session, folder = model.load(), stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-demo-"))
        stack.callback(session.close)  # Before the folder is deleted: kept KV may still be written.
        store = PackStore(folder)
        _show_answers(out, session, store, facts)
        _show_agent(out, session, store, facts)
        _show_style(out, session)
    out.print(_NEXT)
    out.print(f"{time.perf_counter() - began:.0f} s in all; every figure above was counted in this run.", style="dim")


def _show_answers(out: Console, session: Session, store: PackStore, facts: Sequence[str]) -> None:
    """Answer one question from passages of three sizes, as text and as packs; compare answers and seconds."""
    passages = [next(_passages(session, facts, [tokens])) for tokens in _TOKENS]
    out.print("Compiling three packs, once for each text ...")
    with waiting("Compiling"):
        session.generate(passages[0], max_tokens=2)  # Warm up: the first pass sets up kernels.
        packs = [str(store.put(session.build_pack(passage))) for passage in passages]

    def answer(knowledge: str) -> Generation:
        session.clear_cache()
        prompt = f"{knowledge}\n\nIn a few words: {_QUESTION}"
        return session.generate(prompt, view=store.view("default"), recognise=False, max_tokens=32)

    out.print("Asking, with text and with packs ...")
    with waiting("Asking"):
        answers = [(answer(passage), answer(pack)) for passage, pack in zip(passages, packs, strict=True)]
    _heading(out, 1, "The same answer", f"The question: {_QUESTION}")
    text, pack = answers[1]
    out.print(f"text  {text.text.strip()}", style="yellow")
    out.print(f"pack  {pack.text.strip()}", style="green")
    out.print(
        f"{'The same' if text.token_ids == pack.token_ids else 'Not the same'} {len(pack.token_ids)} tokens. The "
        f"prompt that was read has {len(text.prompt):,} tokens both times; {pack.usage.pack_tokens:,} of them came "
        "from the pack."
    )
    _heading(out, 2, "How much sooner the first token comes", "Each pack is read from disk for its question.")
    for text, pack in answers:
        seconds, pack_seconds = text.usage.ttft_s, pack.usage.ttft_s
        out.print(f"{pack.usage.pack_tokens:>6,} tokens  text {seconds:.2f} s  ", style="yellow", end="")
        out.print(f"pack {pack_seconds:.2f} s  {seconds / pack_seconds:.0f} x", style="green")


def _show_agent(out: Console, session: Session, store: PackStore, facts: Sequence[str]) -> None:
    """Show the tokens that two agents send, which search again and again and keep what they computed."""
    _heading(out, 3, "An agent whose prompt does not grow", "Tokens sent to the model after each of its searches:")
    texts, packs = list(_passages(session, facts, [_FOUND] * _SEARCHES)), list[str]()
    session.clear_cache()
    for count, text in enumerate(texts, 1):
        with waiting("Searching"):
            packs.append(str(store.put(session.build_pack(text, compiled_for="system", lazy=True))))
            messages = [{"role": "user", "content": text} for text in (*texts[:count], _QUESTION)]
            as_text = session.prefill(messages).usage.prompt_tokens
            usage = session.prefill(_QUESTION, packs=packs, placement="system", view=store.view("default")).usage
        line = Text(f"search {count}  ").append(f"text {as_text:<7,}", "yellow")
        out.print(line.append(f"packs {usage.prompt_tokens:,}", "green"))


def _show_style(out: Console, session: Session) -> None:
    """Answer one question at three strengths of a steering."""
    from kp_core.steering import preset

    _heading(out, 4, "A style that no prompt spends a token on", f"The question: {_STYLED}")
    out.print("Making a steering from pairs of sentences, formal and casual ...")
    with waiting("Steering"):
        formal = session.make_steering(preset("formal"), progress=False)
    for alpha, name in _ALPHAS.items():
        steering = (formal, alpha) if alpha else None
        with waiting("Answering"):
            generation = session.generate(_STYLED, steering=steering, max_tokens=32, stop=["."])
        sent = f"({generation.usage.prompt_tokens} tokens sent)"
        out.print(Text.assemble((f"{name:>9}  ", "bold"), f"{generation.text.strip()}  {sent}"))


def _passages(session: Session, facts: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Consecutive passages of whole facts, each of about as many tokens as `sizes` says."""
    counts = [len(session.tokenizer.encode(f"{fact}\n", add_special_tokens=False)) for fact in facts]
    start = 0
    for target_size in sizes:
        stop = start + max(1, sum(total <= target_size for total in itertools.accumulate(counts[start:])))
        yield "\n".join(facts[start:stop])
        start = stop


def _heading(out: Console, number: int, title: str, about: str) -> None:
    out.print(Text.assemble((f"\n{number}. {title}", "bold"), ("  " + about, "dim")))
