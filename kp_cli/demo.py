"""`kp demo`: what packs do, on one screen in a minute, with the bundled model and facts about invented islands."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kp_cli.shared import ModelOptions, console, spread

if TYPE_CHECKING:
    from kp_core import Generation, PackView, Session

__all__ = ["demo"]

_TOKENS = (250, 1000, 4000)
_SEARCHES, _FOUND = 8, 120  # Number of the agent's searches, and about how many tokens each finds.
_QUESTION = "What is the name of the highest peak on Thranmoor?"
_STYLED = "What is the sun?"
_ALPHAS = {-1.0: "casual", 0.0: "as it is", 1.5: "formal"}
_NEXT = (
    ("kp build notes FOLDER", "your own files: PDF, Word, Markdown, HTML, text"),
    ("kp ask notes QUESTION", "its packs are compiled by the first question that needs them"),
    ("kp chat notes", "go on asking"),
    ("kp --help", "all else; README.md has LangChain, LlamaIndex, Python"),
)


@spread
def demo(*, model: ModelOptions) -> None:
    """See in a minute what packs do: the same answer, sooner, at a prompt that does not grow, in a style of its own."""
    began, out = time.perf_counter(), console()
    out.print("Knowledge Packs: text is read once, and then only named.", style="bold")
    with ExitStack() as stack:
        session, folder = model.load(), stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-demo-"))
        stack.callback(session.close)  # Before the folder is deleted: kept KV may still be written.
        demonstration = _Demo(out, session, Path(folder))
        demonstration.same_and_sooner()
        demonstration.agent()
        demonstration.style()
    out.print("\nWhat to try next", style="bold")
    for command, description in _NEXT:
        out.print(f"  {command:<24}{description}")
    out.print(f"\n{time.perf_counter() - began:.0f} s in all; every figure above was counted in this run.", style="dim")


class _Demo:
    """A model, passages of facts that questions are about, and a temporary store for their packs."""

    def __init__(self, out: Console, session: Session, folder: Path) -> None:
        from kp_core import PackStore

        self._out, self._session, self._store = out, session, PackStore(folder)
        self._view = self._store.view("default")
        facts = (files("kp_cli") / "isles.jsonl").read_text(encoding="utf-8")
        self._facts = [str(json.loads(line)["text"]) for line in facts.splitlines()]
        self._sizes = [len(session.tokenizer.encode(f"{fact}\n", add_special_tokens=False)) for fact in self._facts]

    def same_and_sooner(self) -> None:
        """Answer one question from passages of three sizes, as text and as packs; compare answers and seconds."""
        passages = {tokens: next(self._cut([tokens])) for tokens in _TOKENS}
        self._out.print("Compiling three packs, once for each text ...")
        self._session.generate(passages[_TOKENS[0]], max_tokens=2)  # Warm up: the first pass sets up kernels.
        packs = {tokens: str(self._store.put(self._session.build_pack(passages[tokens]))) for tokens in _TOKENS}
        self._out.print("Asking, with text and with packs ...")
        answers: dict[int, tuple[Generation, Generation]] = {}
        for tokens in _TOKENS:
            answers[tokens] = self._answer(passages[tokens]), self._answer(packs[tokens], self._view)
        self._heading(1, "The same answer", f"The question: {_QUESTION}")
        text, pack = answers[_TOKENS[1]]
        self._out.print(f"text  {text.text.strip()}", style="yellow")
        self._out.print(f"pack  {pack.text.strip()}", style="green")
        self._out.print(
            f"{'The same' if text.token_ids == pack.token_ids else 'Not the same'} {len(pack.token_ids)} tokens. The "
            f"prompt that was read has {len(text.prompt):,} tokens both times; {pack.usage.pack_tokens:,} of them came "
            "from the pack."
        )
        self._heading(2, "How much sooner the first token comes", "Each pack is read from disk for its question.")
        for text, pack in answers.values():
            seconds, pack_seconds = text.usage.ttft_s, pack.usage.ttft_s
            self._out.print(f"{pack.usage.pack_tokens:>6,} tokens  text {seconds:.2f} s  ", style="yellow", end="")
            self._out.print(f"pack {pack_seconds:.2f} s  {seconds / pack_seconds:.0f} x", style="green")

    def agent(self) -> None:
        """Show the tokens that two agents send, which search again and again and keep what they computed."""
        self._heading(3, "An agent whose prompt does not grow", "Tokens sent to the model after each of its searches:")
        session, texts, packs = self._session, list(self._cut([_FOUND] * _SEARCHES)), list[str]()
        session.clear_cache()
        for count, text in enumerate(texts, 1):
            packs.append(str(self._store.put(session.build_pack(text, compiled_for="system", lazy=True))))
            messages = [{"role": "user", "content": text} for text in (*texts[:count], _QUESTION)]
            as_text = session.prefill(messages).usage.prompt_tokens
            usage = session.prefill(_QUESTION, packs=packs, placement="system", view=self._view).usage
            line = Text(f"search {count}  ").append(f"text {as_text:<7,}", "yellow")
            self._out.print(line.append(f"packs {usage.prompt_tokens:,}", "green"))

    def style(self) -> None:
        """Answer one question at three strengths of a steering."""
        from kp_core.steering import preset

        self._heading(4, "A style that no prompt spends a token on", f"The question: {_STYLED}")
        self._out.print("Making a steering from pairs of sentences, formal and casual ...")
        formal = self._session.make_steering(preset("formal"), progress=False)
        for alpha, name in _ALPHAS.items():
            steering = (formal, alpha) if alpha else None
            generation = self._session.generate(_STYLED, steering=steering, max_tokens=32, stop=["."])
            sent = f"({generation.usage.prompt_tokens} tokens sent)"
            self._out.print(Text.assemble((f"{name:>9}  ", "bold"), f"{generation.text.strip()}  {sent}"))

    def _cut(self, sizes: Sequence[int]) -> Iterator[str]:
        """Consecutive passages of whole facts, each of about as many tokens as `sizes` says."""
        start = 0
        for target_size in sizes:
            sums = itertools.accumulate(self._sizes[start:])
            stop = start + max(1, sum(total <= target_size for total in sums))
            yield "\n".join(self._facts[start:stop])
            start = stop

    def _answer(self, knowledge: str, view: PackView | None = None) -> Generation:
        """An answer from a plain text or, with a view, from a handle whose KV is on disk. Nothing is in memory."""
        self._session.clear_cache()
        return self._session.generate(f"{knowledge}\n\nIn a few words: {_QUESTION}", view=view, max_tokens=32)

    def _heading(self, number: int, title: str, about: str) -> None:
        self._out.print(Text.assemble((f"\n{number}. {title}", "bold"), ("  " + about, "dim")))
