"""Two checkouts of this repository in one run: is this one slower than that one, and what does plain transformers take?

The other checkout is `--other`, or a worktree of the revision `--rev` made for the run. Each side is a process that
stays up (`benchmarks.side_worker`); they are asked in turn, one pair after the other, so that a noisy machine is noisy
to both. A process may be 4 % faster than another for all of its life, so both are started again `--starts` times:

- first token: the handle of a stored pack that is warm in memory, another question each time, one token generated.
- decoding: seconds a token of an answer of `--answer` tokens behind a prompt of so many that is warm in memory.
- users: seconds a token of the answers to eight users at once, with a question each behind one warm pack.
- prefill: a prompt of text with nothing cached.
- forward: one forward pass of plain transformers over the ids of that prompt, in a process of its own.

A ratio is the median of the pairs' ratios, with the 95 % interval that the order statistics give (none below 6 pairs).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

from rich.progress import track

from benchmarks import common

__all__ = ["main", "run"]

_HERE = Path(__file__).parents[1]
_FACTS = _HERE / "cookbooks/demo/facts.jsonl"
_USERS = 8


class _Side:
    """A process that answers commands."""

    def __init__(self, process: subprocess.Popen[str], checkout: Path) -> None:
        self._process = process
        found = Path(self._read()["kp_core"]).resolve()
        if not found.is_relative_to(checkout.resolve()):
            raise RuntimeError(f"Got kp_core from {found}; expected it from {checkout}.")

    def ask(self, do: str, **given: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever JSON holds
        """The answer to one command; `RuntimeError` when the process ended, whose traceback is on stderr then."""
        _of(self._process.stdin).write(json.dumps({"do": do, **given}) + "\n")
        _of(self._process.stdin).flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = _of(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"A side ended with status {self._process.wait()}; see above for why.")
        return dict(json.loads(line))


def _of(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("The process has no pipe.")
    return pipe


@contextmanager
def _started(arguments: argparse.Namespace, checkout: Path, *options: str) -> Iterator[_Side]:
    """A side that runs on `checkout`."""
    told = [f"--{name}={getattr(arguments, name)}" for name in ("dtype", "device")]
    worker = str(Path(__file__).with_name("side_worker.py"))
    # -P keeps this folder off the path: names in it are no packages.
    command = [sys.executable, "-P", worker, f"--model={common.model_path(arguments)}", *told, *options]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    with subprocess.Popen(  # noqa: S603 - our own
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield _Side(process, checkout)
        finally:
            _of(process.stdin).close()


@contextmanager
def _worktree(rev: str) -> Iterator[Path]:
    """A checkout of `rev`, removed at the end."""
    git = ["git", "-C", str(_HERE), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "other"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), rev], check=True)  # noqa: S603 - our own
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)  # noqa: S603 - our own


def compared(new: Sequence[float], old: Sequence[float]) -> dict[str, float | None]:
    """Medians in seconds, and the median of the ratios new to old with its interval."""
    return {"new_s": median(new), "old_s": median(old), **common.median_ratio(new, old)}


_Ask = Callable[[int], dict[str, Any]]
"""What one side answers for the pair of this number."""


def _in_turn(what: str, pairs: int, asks: Sequence[_Ask]) -> list[list[float]]:
    """Seconds of each of `asks`, pair by pair; what comes before the first pair brings all to memory."""
    took: list[list[float]] = [[] for _ in asks]
    for number in track(range(-1, pairs), what):
        for ask, seconds in zip(asks, took, strict=True):
            answer = ask(number)
            if number < 0:
                continue
            if not answer.get("from_memory", True):
                raise RuntimeError(f"Got {answer}; expected the pack to be in memory.")
            seconds.append(answer["seconds"])
    return took


def _first_token(side: _Side, known: str) -> _Ask:
    handle = side.ask("pack", text=known)["handle"]
    return lambda number: side.ask("first_token", said=f"{handle}\n\nQuestion {number}: which of these stands there?")


def _users(side: _Side, known: str, answer: int) -> _Ask:
    handle = side.ask("pack", text=known)["handle"]
    return lambda _: side.ask("users", said=handle, count=_USERS, tokens=answer)


def _decode(side: _Side, said: str, answer: int) -> _Ask:
    return lambda _: side.ask("decode", said=said, tokens=answer)


def _prefill(side: _Side, said: str) -> _Ask:
    return lambda _: side.ask("prefill", said=said)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    took: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        other = arguments.other or stack.enter_context(_worktree(arguments.rev))
        for start in range(starts := max(1, min(arguments.starts, arguments.pairs))):
            pairs = len(range(start, arguments.pairs, starts))
            for name, seconds in _one_start(arguments, other, pairs):
                before = took.setdefault(name, [[] for _ in seconds])
                for all_seconds, more in zip(before, seconds, strict=True):
                    all_seconds.extend(more)
    rows = {name: compared(new, old) for name, (new, old, *_) in took.items()}
    *_, (name, (new, old, plain)) = took.items()
    rows |= {f"{name}, to one forward pass": compared(new, plain)}
    rows |= {"the other's, to one forward pass": compared(old, plain)}
    return {"dtype": arguments.dtype, "pairs": arguments.pairs, "rows": rows}


def _one_start(arguments: argparse.Namespace, other: Path, pairs: int) -> Iterator[tuple[str, list[list[float]]]]:
    """What is measured, with the seconds of this checkout and of `other`; prefill, last, with those of transformers."""
    text = "\n".join(map(str, common.read_passages(_FACTS)))
    with ExitStack() as stack:
        sides = [stack.enter_context(_started(arguments, checkout)) for checkout in (_HERE, other)]
        hf = stack.enter_context(_started(arguments, _HERE, "--plain"))

        def cut(tokens: int) -> dict[str, Any]:
            return sides[0].ask("cut", text=text, tokens=tokens)

        asked: dict[str, list[_Ask]] = {}
        for tokens in arguments.packs:
            known = cut(tokens)["text"]
            asked[f"first token, pack of {tokens}"] = [_first_token(side, known) for side in sides]
            asked[f"{_USERS} users, pack of {tokens}"] = [_users(side, known, arguments.answer) for side in sides]
        for tokens in arguments.behind:
            said = cut(tokens)["text"]
            asked[f"decoding behind {tokens}"] = [_decode(side, said, arguments.answer) for side in sides]
        prompt = cut(arguments.tokens)
        asked[f"prefill of {arguments.tokens}"] = [
            *(_prefill(side, prompt["text"]) for side in sides),
            lambda _: hf.ask("forward", ids=prompt["ids"]),
        ]
        for name, asks in asked.items():
            yield name, _in_turn(name, pairs, asks)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "")
    parser.add_argument("--other", type=Path, metavar="PATH", help="the other checkout")
    parser.add_argument("--rev", default="e54cf58", help="its revision, without --other; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--starts", type=int, default=4, metavar="N", help="of the processes; default: %(default)s")
    parser.add_argument("--packs", type=int, nargs="+", default=[1000, 4000], metavar="N", help="tokens of packs")
    parser.add_argument(
        "--behind", type=int, nargs="*", default=[50, 1000, 4000], metavar="N", help="tokens decoded behind"
    )
    parser.add_argument("--answer", type=int, default=48, metavar="N", help="tokens of an answer; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of the prefill; default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    common.show_table(
        f"Side by side: {figures['pairs']} pairs, {figures['dtype']}",
        ("what", "new s", "old s", "ratio", "95 % interval"),
        [
            (
                name,
                row["new_s"],
                row["old_s"],
                row["ratio"],
                "-" if row["low"] is None or row["high"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
            )
            for name, row in figures["rows"].items()
        ],
    )
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
