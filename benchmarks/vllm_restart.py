"""First tokens of `kp serve` after a restart: from packs in the store, beside their text cold and warm."""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.vllm_desk import ASKED, Desk, passages, restarted
from benchmarks.vllmserver import KpServer

__all__ = ["after_restart", "spliced"]

_TOKENS = 1800
_MOVED, _MOVED_TOKENS = 10, 200


def after_restart(server: KpServer, arguments: argparse.Namespace) -> dict[str, float]:
    """Medians of seconds to the first token: a pack after a restart, its text cold, and its text once more."""
    desk = Desk(server, "packs")
    found = passages(desk, arguments, _TOKENS, arguments.after_restart)
    handles = [desk.handle(text) for text in found]
    for handle in handles:
        desk.ask(f"{handle}\n\n{ASKED}", 1)
    restarted(server)
    desk, plain = Desk(server, "packs"), Desk(server, "text")
    seconds: dict[str, list[float]] = {"pack_s": [], "text_s": [], "cached_s": []}
    for handle, text in zip(handles, found, strict=True):
        for name, own, known in (("pack_s", desk, handle), ("text_s", plain, text), ("cached_s", plain, text)):
            said = own.ask(f"{known}\n\n{ASKED}", 1)
            seconds[name].append(said.usage.ttft_s)
            if (said.usage.computed_tokens < len(said.prompt) / 2) == (name == "text_s"):
                raise RuntimeError(f"Got {said.usage} ({name}); expected the text cold, and else its KV at hand.")
    medians = {name: median(each) for name, each in seconds.items()}
    return {"tokens": _TOKENS, **medians, "sooner": medians["text_s"] / medians["pack_s"]}


def spliced(server: KpServer, arguments: argparse.Namespace) -> dict[str, float]:
    """Medians of seconds to the first token: packs that are moved, first and after a restart, and their text."""
    desk = Desk(server, "packs")
    found = passages(desk, arguments, _MOVED_TOKENS, _MOVED * arguments.spliced)
    texts = [found[at : at + _MOVED] for at in range(0, len(found), _MOVED)]
    handles = [[desk.handle(text) for text in each] for each in texts]
    for handle in (each for row in handles for each in row):
        desk.ask(handle, 1)  # Compiled, as by a use before.
    medians: dict[str, float] = {}
    for name in ("first", "again", "text", "cached"):
        if name in ("again", "text"):
            restarted(server)
        own, rows = ("text", texts) if name in ("text", "cached") else ("packs", handles)
        desk = Desk(server, own)
        said = [desk.ask("\n".join([*row, ASKED]), 1, composer="splice") for row in rows]
        medians[f"{name}_s"] = median(each.usage.ttft_s for each in said)
    return {**medians, **{f"{name}_sooner": medians["text_s"] / medians[f"{name}_s"] for name in ("first", "again")}}
