"""`kp demo`: what packs do, on one screen in a minute, with the bundled model and facts about invented islands."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from kp_cli.shared import ModelOptions, console, spread

if TYPE_CHECKING:
    from kp_core import Generation, Handle, Session

__all__ = ["demo"]

_TOKENS = (250, 1000, 4000)
_SEARCHES, _FOUND = 8, 120  # Number of the agent's searches, and about how many tokens each finds.
_QUESTION = "What is the name of the highest peak on Thranmoor?"
_STYLED = "What is the sun?"
_ALPHAS = {-1.0: "casual", 0.0: "as it is", 1.5: "formal"}
_BAR = 36
_NEXT = (
    ("kp build notes FOLDER", "your own files: PDF, Word, Markdown, HTML, text"),
    ("kp ask notes QUESTION", "ask twice, and see what the second question saves"),
    ("kp chat notes", "go on asking"),
    ("kp --help", "everything else; README.md has LangChain, LlamaIndex and Python"),
)


@spread
def demo(*, model: ModelOptions) -> None:
    """See in a minute what packs do: the same answer, sooner, at a prompt that does not grow, in a style of its own."""
    began, out = time.perf_counter(), console()
    out.print("Knowledge Packs: text is read once, and then only named.", style="bold")
    with ExitStack() as stack:
        # A line that stays: on the first run, a progress bar of the model's conversion follows.
        out.print("Loading the model ...")
        demonstration = _Demo(model.load(), Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-demo-"))))
        stack.callback(demonstration.session.close)  # Before the folder is deleted: kept KV may still be written.
        with _doing(out, "Compiling three packs, as is done once for each text"):
            demonstration.compile()
        _heading(out, 1, "The same answer", f"The question: {_QUESTION}")
        demonstration.side_by_side(out)
        _heading(out, 2, "How much sooner the first token comes", "Each pack is read from disk for its question.")
        demonstration.sooner(out)
        _heading(out, 3, "An agent whose prompt does not grow", "Tokens sent to the model after each of its searches:")
        demonstration.agent(out)
        _heading(out, 4, "A style that no prompt spends a token on", f"The question: {_STYLED}")
        demonstration.style(out)
    out.print("\nWhat to try next", style="bold")
    for command, description in _NEXT:
        out.print(f"  {command:<24}{description}")
    out.print(f"\n{time.perf_counter() - began:.0f} s in all; every figure above was counted in this run.", style="dim")


class _Demo:
    """A model, the passages that questions are about, and their packs in a temporary folder."""

    def __init__(self, session: Session, folder: Path) -> None:
        from kp_core import PackStore

        self.session, self._store = session, PackStore(folder)
        self._view = self._store.view("default")
        facts = (files("kp_cli") / "isles.jsonl").read_text(encoding="utf-8")
        self._facts = [str(json.loads(line)["text"]) for line in facts.splitlines()]
        self._sizes = [len(session.tokenizer.encode(f"{fact}\n", add_special_tokens=False)) for fact in self._facts]
        self.passages = {tokens: next(self._cut([tokens])) for tokens in _TOKENS}
        self._handles: dict[int, Handle] = {}
        self._took: dict[tuple[int, str], float] = {}
        # Warm up: the first pass sets up kernels and lays out weights; no question should pay for it.
        session.generate(self.passages[_TOKENS[0]], max_tokens=2)
        session.clear_cache()

    def _cut(self, sizes: Sequence[int]) -> Iterator[str]:
        """Consecutive passages of whole facts, each of about as many tokens as `sizes` says."""
        start = 0
        for target_size in sizes:
            sums = itertools.accumulate(self._sizes[start:])
            stop = start + max(1, sum(total <= target_size for total in sums))
            yield "\n".join(self._facts[start:stop])
            start = stop

    def compile(self) -> None:
        """Compile the packs of the passages."""
        for tokens, text in self.passages.items():
            self._handles[tokens] = self._store.put(self.session.build_pack(text))

    def answer(self, tokens: int, way: str, said: Callable[[str], object], *, most: int = 32) -> Generation:
        """An answer from the passage of `tokens` tokens. Nothing is in memory; the KV of packs is on disk.

        A text is recognised as that of a pack, but no KV is reused for it. So both prompts are divided alike, and
        rounding cannot make their answers differ.
        """
        self.session.clear_cache()
        knowledge = self.passages[tokens] if way == "text" else str(self._handles[tokens])
        settings: dict[str, Any] = {"view": self._view, "reuse": way == "pack", "max_tokens": most}
        with closing(self.session.stream(f"{knowledge}\n\nIn a few words: {_QUESTION}", **settings)) as stream:
            for piece in stream:
                said(piece)
            generation = stream.result()
        self._took[tokens, way] = min(generation.usage.ttft_s, self._took.get((tokens, way), generation.usage.ttft_s))
        return generation

    def side_by_side(self, out: Console) -> None:
        """Answer one question from text and from its pack, side by side."""
        sides = {way: _Side(out, way) for way in ("text", "pack")}
        generations = {}
        with Live(Columns(sides.values(), padding=0), console=out, refresh_per_second=10):
            for way, side in sides.items():
                side.began = time.perf_counter()
                generations[way] = self.answer(_TOKENS[1], way, side.pieces.append)
                side.stop(generations[way])
        if not out.is_terminal:
            out.line()  # Without a terminal, rich prints the panels once, at the end, without a line break.
        text, pack = generations["text"], generations["pack"]
        is_same = text.token_ids == pack.token_ids
        out.print(
            f"{'The same' if is_same else 'Not the same'} {len(pack.token_ids)} tokens. The prompt that was read has "
            f"{len(text.prompt):,} tokens both times; {pack.usage.pack_tokens:,} of them came from the pack."
        )

    def sooner(self, out: Console) -> None:
        """Show the seconds until the first token as bars."""
        for tokens in _TOKENS:
            for way in ("text", "pack"):
                if (tokens, way) not in self._took:
                    with _doing(out, f"Asking about {tokens:,} tokens as {way}"):
                        self.answer(tokens, way, lambda _: None, most=1)
        longest = max(self._took.values())
        for tokens in _TOKENS:
            text, pack = self._took[tokens, "text"], self._took[tokens, "pack"]
            pack_tokens = len(self._store.get(self._handles[tokens]).token_ids)
            out.print(f"{pack_tokens:>6,} tokens  text {_bar(out, text / longest)} {text:.2f} s", style="yellow")
            out.print(f"{'':>14} pack {_bar(out, pack / longest)} {pack:.2f} s  {text / pack:.0f} x", style="green")

    def agent(self, out: Console) -> None:
        """Show the tokens that two agents send, which search again and again and keep what they computed."""
        texts = list(self._cut([_FOUND] * _SEARCHES))
        packs = [
            str(self._store.put(self.session.build_pack(text, compiled_for="system", lazy=True))) for text in texts
        ]
        sent_tokens: dict[str, list[int]] = {"text": [], "packs": []}
        self.session.clear_cache()
        with _doing(out, f"Searching {_SEARCHES} times, with text and with packs"):
            for count in range(1, _SEARCHES + 1):
                messages = [{"role": "user", "content": text} for text in (*texts[:count], _QUESTION)]
                sent_tokens["text"].append(self.session.prefill(messages).usage.prompt_tokens)
                usage = self.session.prefill(_QUESTION, packs=packs[:count], placement="system", view=self._view).usage
                sent_tokens["packs"].append(usage.prompt_tokens)
        longest = max(sent_tokens["text"])
        for number, (text, pack) in enumerate(zip(*sent_tokens.values(), strict=True), 1):
            line = Text(f"search {number}  ")
            line.append(f"{_bar(out, text / longest, _BAR // 2)} {text:<6,}", "yellow")
            line.append(f"{_bar(out, pack / longest, _BAR // 2)} {pack:,}", "green")
            out.print(line)
        out.print(f"{'':>10}{'text':<{_BAR // 2 + 8}}packs", style="dim")

    def style(self, out: Console) -> None:
        """Answer one question at three strengths of a steering."""
        from kp_core.steering import preset

        with _doing(out, "Making a steering of pairs of sentences, formal and casual"):
            formal = self.session.make_steering(preset("formal"), progress=False)
        for alpha, name in _ALPHAS.items():
            steering = (formal, alpha) if alpha else None
            generation = self.session.generate(_STYLED, steering=steering, max_tokens=32, stop=["."])
            line = Text(f"{name:>9}  ", "bold")
            out.print(
                line.append(f"{generation.text.strip()}  ({generation.usage.prompt_tokens} tokens sent)", "not bold")
            )


class _Side:
    """The panel of one of two answers, with its clock."""

    def __init__(self, out: Console, way: str) -> None:
        self._way, self._width = way, out.width if out.width < 80 else out.width // 2
        self.pieces: list[str] = []
        self.began = self._ended = 0.0
        self._told = "waiting"

    def stop(self, made: Generation) -> None:
        """Stop the clock, and show what the answer cost."""
        usage = made.usage
        self._ended = time.perf_counter()
        sent_tokens = len(made.prompt) if self._way == "text" else usage.prompt_tokens
        self._told = (
            f"{sent_tokens:,} tokens sent, {usage.computed_tokens:,} computed; first token after {usage.ttft_s:.2f} s"
        )

    def __rich__(self) -> Panel:
        now = (self._ended or time.perf_counter()) - self.began if self.began else 0.0
        status_line = Text(self._told if self._ended or not self.began else "reading ...", "dim")
        answer = Text("".join(self.pieces).strip() or " ", "yellow" if self._way == "text" else "green")
        return Panel(Group(answer, status_line), title=f"{self._way}  {now:.1f} s", width=self._width, height=8)


@contextmanager
def _doing(out: Console, words: str) -> Iterator[None]:
    """Show `words` while something runs: on a terminal until it is done, else as a line."""
    if not out.is_terminal:
        out.print(f"{words} ...")
    with out.status(f"{words} ...", spinner="dots" if _is_utf(out) else "line"):
        yield


def _heading(out: Console, number: int, title: str, about: str) -> None:
    out.print(Text.assemble((f"\n{number}. {title}", "bold"), ("  " + about, "dim")))


def _is_utf(out: Console) -> bool:
    return out.encoding.lower().startswith("utf")


def _bar(out: Console, share: float, width: int = 0) -> str:
    width = width or min(_BAR, max(10, out.width - 40))
    return ("█" if _is_utf(out) else "#") * max(1, round(share * width))
