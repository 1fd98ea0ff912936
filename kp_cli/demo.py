"""`kp demo`: what packs do, on one screen in a minute, with the bundled model and facts about invented islands."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kp_cli import waiting
from kp_cli.options import ModelOptions, spread
from kp_cli.output import console
from kp_cli.sources import read_facts
from kp_core import Generation, PackStore, Session
from kp_core.steering import preset

_TOKENS = (500, 2000)
_PASSAGES, _LENGTH = 10, 130  # As a search finds them: how many, and tokens of each, about.
_QUESTION = "What is the name of the highest peak on Thranmoor?"
_ANSWER = "Mount Sarrow"
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
    """See in a minute what packs do: the same answer, sooner, in a style of its own."""
    began, out = time.perf_counter(), console()
    out.print("Knowledge Packs: text is read once, and then only named.", style="bold")
    facts = [fact.text for fact in read_facts(Path(__file__).with_name("isles.jsonl"))]
    with ExitStack() as stack:
        session, folder = model.load(), stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-demo-"))
        stack.callback(session.close)  # Before the folder is deleted: kept KV may still be written.
        store = PackStore(folder)
        _show_one(out, session, store, facts)
        _show_ten(out, session, store, facts)
        _show_style(out, session)
    out.print(_NEXT)
    out.print(f"{time.perf_counter() - began:.0f} s in all; every figure above was counted in this run.", style="dim")


def _show_one(out: Console, session: Session, store: PackStore, facts: Sequence[str]) -> None:
    """Answer one question from passages of two sizes, as text and as a pack from disk."""
    _heading(out, 1, "The same answer, sooner", f"The question: {_QUESTION}")
    out.print("Each passage is sent as text and as a pack that was compiled before: seconds to the first token.")
    out.print("A model this small is often wrong; packs change nothing about that.")
    session.generate("Hello.", max_tokens=2)  # Warm up: the first pass sets up kernels.
    for tokens in _TOKENS:
        text, read = _compared(out, session, store, [next(_passages(session, facts, [tokens]))])
        same = "The same" if text.token_ids == read.token_ids else "Not the same"
        out.print(f"{same} {len(read.token_ids)} tokens answer both: {read.text.strip()}")


def _show_ten(out: Console, session: Session, store: PackStore, facts: Sequence[str]) -> None:
    """Answer from ten passages, of which `select` reads those that the question is about."""
    _heading(out, 2, "Ten passages, as a search finds them", f"The question: {_QUESTION}")
    out.print("As packs, the model's own attention chooses which are read (`select`); the rest is never computed.")
    passages = list(_passages(session, facts, [_LENGTH] * _PASSAGES))
    text, read = _compared(out, session, store, passages, composer="select")
    out.print(f"{read.usage.unread_packs} of {len(passages)} packs were left out. The passages say {_ANSWER}.")
    out.print(f"text  {text.text.strip()}", style="yellow")
    out.print(f"packs {read.text.strip()}", style="green")


def _compared(
    out: Console, session: Session, store: PackStore, passages: Sequence[str], **options: str
) -> tuple[Generation, Generation]:
    """Answers from passages as text and as packs, each with nothing in memory. Prints how soon they began."""

    def asked(knowledge: Sequence[str], **options: str) -> Generation:
        session.clear_cache()
        prompt = "\n\n".join((*knowledge, f"In a few words: {_QUESTION}"))
        with waiting("Asking"):
            return session.generate(prompt, view=store.view("default"), max_tokens=32, **options)

    text = asked(passages)
    with waiting("Compiling packs, once for each text"):  # The KV of one text is in memory now, and its pack gets it.
        packs = [str(store.put(pack)) for pack in session.build_packs(passages, progress=False)]
    read = asked(packs, **options)
    seconds, sooner = text.usage.ttft_s, read.usage.ttft_s
    out.print(f"{text.usage.prompt_tokens:>6,} tokens  text {seconds:.2f} s  ", style="yellow", end="")
    out.print(f"packs {sooner:.2f} s  {seconds / sooner:.1f} x sooner", style="green")
    return text, read


def _show_style(out: Console, session: Session) -> None:
    """Answer one question at three strengths of a steering."""
    _heading(out, 3, "A style that no prompt spends a token on", f"The question: {_STYLED}")
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
