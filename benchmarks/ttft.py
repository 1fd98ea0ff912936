"""Time to first token behind 256 to 8,000 tokens of knowledge, which stand at the start of the user message.

Per length, each repetition asks another question of about 12 tokens, and measures in turn, so that a noisy machine is
noisy to all columns alike (medians; text above 2,048 tokens is repeated 3 times at most):

- text: everything prefilled by the engine (`reuse=False`).
- pack memory: the handle, the pack warm in the prefix tree; head and pack reused, the question computed.
- pack disk: the handle in a fresh process, file read included; see `benchmarks.fresh`. Half as often, as it loads a
  model. Pack page cache: the same, with the file in the system's page cache.
- floor: plain transformers with its own attention: one forward pass of the question's tokens over a cache that already
  holds the rest. No template, no tokenizer, no copy.
- hf text: plain `model.generate` on the same token ids, default attention.

`peak_bytes` is what a request needs beyond what the process holds; see `benchmarks.fresh`. For 1,000 tokens of
knowledge `tokens` says 1,000; the prompt has the template and the question besides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from benchmarks import common
from benchmarks.floor import Floor
from kp_core import KnowledgePack, PackStore, Session

__all__ = ["main", "run"]

_LENGTHS = (256, 512, 1024, 2048, 4096, 7500, 8000)
_LONG = 2048
_LONG_REPEATS = 3
_COLUMNS = ("text_s", "pack_memory_s", "pack_disk_s", "pack_cached_s", "floor_s", "hf_text_s", "peak_bytes")


def knowledge(engine: Session, passages: Sequence[common.Paragraph], tokens: int) -> KnowledgePack:
    """A pack of exactly `tokens` tokens, built from passages in order.

    Raises `ValueError` when there is too little text.
    """
    # Where the text is cut decides how many of its last tokens are the pack's own, so not every length can be had from
    # every text.
    for first in range(min(len(passages), 8)):
        ids = engine.tokenizer.encode("\n".join(map(str, passages[first:])), add_special_tokens=False)
        for cut in range(tokens, min(tokens + 8, len(ids) + 1)):
            found = engine.build_pack(engine.tokenizer.decode(ids[:cut]), lazy=True)
            if len(found.token_ids) == tokens:
                return engine.build_pack(found.text)
    raise ValueError(f"The data gives no pack of {tokens} tokens; use more or other text.")


class _Bench:
    """One length of knowledge, measured once per call of `measure`."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        engine: Session,
        twin: common.Twin,
        pack: KnowledgePack,
        folder: Path,
    ) -> None:
        self._arguments, self._engine, self._twin, self._folder = arguments, engine, twin, folder
        store = PackStore(folder)
        self._handle, self._view = store.put(pack), store.view("default")
        engine.clear_cache()
        prompt = engine.prefill(self._said("Is it so?"), view=self._view).prompt
        self._prefix = prompt.token_ids[: prompt.spans[0].stop]
        self._floor = Floor(twin.model, self._prefix, room=64)

    def _said(self, question: str) -> str:
        return f"{self._handle}\n\n{question}"

    def text(self, question: str) -> tuple[float, tuple[int, ...]]:
        """Seconds with nothing cached, and the prompt."""
        found = self._engine.generate(self._said(question), view=self._view, max_tokens=1, reuse=False)
        return found.usage.ttft_s, found.prompt.token_ids

    def pack_memory(self, question: str) -> tuple[float, tuple[int, ...]]:
        """Seconds with the pack in the prefix tree, and the prompt; `RuntimeError` when less was reused."""
        found = self._engine.generate(self._said(question), view=self._view, max_tokens=1)
        if found.usage.reused_tokens < len(self._prefix):
            raise RuntimeError(
                f"Got {found.usage}; expected the {len(self._prefix)} tokens of head and pack to be reused."
            )
        return found.usage.ttft_s, found.prompt.token_ids

    def floor(self, prompt: Sequence[int]) -> float:
        """Seconds of the suffix alone."""
        return self._floor.first_token(prompt[len(self._prefix) :])[1]

    def hf_text(self, prompt: Sequence[int]) -> float:
        """Seconds of plain `generate`."""
        began = time.perf_counter()
        self._twin.generate([prompt], 1)
        return time.perf_counter() - began

    def fresh(self, questions: Sequence[str], *more: str) -> tuple[float, int | None]:
        """Seconds from disk, and the peak of memory, in a fresh process."""
        arguments = self._arguments
        options = {
            "--store": self._folder,
            "--handle": self._handle,
            "--model": common.model_path(arguments),
            "--dtype": arguments.dtype,
            "--device": arguments.device,
        }
        flat = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "benchmarks.fresh", *more, *flat, "--question", *questions]
        root = Path(__file__).parents[1]
        done = subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
        figures = json.loads(done.stdout.splitlines()[-1])
        if figures["reused_tokens"] < figures["pack_tokens"]:
            raise RuntimeError(f"Got {figures}; expected the pack to come from its file.")
        return figures["ttft_s"], figures["peak_bytes"]


def measure(bench: _Bench, tokens: int, questions: Sequence[str], progress: Progress) -> dict[str, Any]:
    """One row: each repetition one question, its columns in turn."""
    found: dict[str, list[float]] = defaultdict(list)
    repeats = len(questions) - 2
    few = repeats if tokens <= _LONG else min(repeats, _LONG_REPEATS)
    task = progress.add_task(f"{tokens} tokens", total=repeats)
    # Once unmeasured: the first call of each shape sets up kernels and fresh memory.
    _, warm = bench.pack_memory(questions[-1])
    bench.floor(warm)
    for number, question in enumerate(questions[:repeats]):
        seconds, prompt = bench.pack_memory(question)
        found["pack_memory_s"].append(seconds)
        found["floor_s"].append(bench.floor(prompt))
        if number < few:
            found["text_s"].append(bench.text(question)[0])
            found["hf_text_s"].append(bench.hf_text(prompt))
        if number % 2 == 0:
            seconds, peak = bench.fresh((question, questions[-2]))
            found["pack_disk_s"].append(seconds)
            found["peak_bytes"] += [] if peak is None else [peak]
            found["pack_cached_s"].append(bench.fresh((question, questions[-2]), "--cached")[0])
        progress.advance(task)
    medians = {column: median(found[column]) if found[column] else None for column in _COLUMNS}
    return {"tokens": tokens, **medians}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    passages = common.read_passages(arguments.data, arguments.limit)
    engine = common.load_engine(arguments)
    twin = common.Twin(arguments, engine.tokenizer)
    asked = itertools.islice(itertools.cycle(passages), arguments.repeats + 2)
    questions = [f"Question {number}: which of these is about {passage.title}?" for number, passage in enumerate(asked)]
    rows = []
    with Progress() as progress:
        for tokens in progress.track(arguments.tokens, description="Lengths"):
            with common.scratch(engine) as folder:
                pack = knowledge(engine, passages, tokens)
                bench = _Bench(arguments, engine, twin, pack, Path(folder))
                rows.append(measure(bench, len(pack.token_ids), questions, progress))
    return {"dtype": arguments.dtype, "bytes_per_token": engine.bytes_per_token, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--tokens", type=int, nargs="+", default=_LENGTHS, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    columns = ("tokens", "text", "pack memory", "pack disk", "page cache", "floor", "hf text", "text / pack",
               "text / disk", "pack / floor", "peak MB", "peak / KV")  # fmt: skip
    rows = [_cells(row, figures["bytes_per_token"]) for row in figures["rows"]]
    common.show_table(f"Time to first token, seconds, {figures['dtype']}", columns, rows)
    common.write_json(arguments.json, figures)
    return figures


def _cells(row: dict[str, Any], bytes_per_token: int) -> list[str]:
    peak = row["peak_bytes"]
    seconds = [f"{row[name]:.3f}" for name in _COLUMNS[:-1]]
    ratios = [row["text_s"] / row["pack_memory_s"], row["text_s"] / row["pack_disk_s"]]
    memory = ["-", "-"] if peak is None else [f"{peak / 1e6:.0f}", f"{peak / bytes_per_token / row['tokens']:.2f}"]
    return [str(row["tokens"]), *seconds, *(f"{ratio:.1f}" for ratio in ratios),
            f"{row['pack_memory_s'] / row['floor_s']:.2f}", *memory]  # fmt: skip


if __name__ == "__main__":
    main()
