"""One side of `benchmarks.side_by_side`: a process with a model loaded that answers JSON lines with JSON lines.

It is run by its path, with the checkout to measure on `PYTHONPATH`, and imports nothing else of this folder. Every
answer to a timed command is `{"seconds": ...}`, by this process's clock around the whole call.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch

import kp_core

_Commands = dict[str, Callable[..., dict[str, Any]]]


def checkout(model: str, dtype: str, device: str, folder: str) -> _Commands:
    """What an engine of this checkout answers; packs are kept in `folder`."""
    engine, store = kp_core.load_engine(model, dtype=dtype, device=device), kp_core.PackStore(folder)
    view = store.view("default")

    def pack(text: str) -> dict[str, Any]:
        found = engine.build_pack(text)
        return {"handle": str(store.put(found)), "tokens": len(found.token_ids)}

    def first_token(said: str) -> dict[str, Any]:
        began = time.perf_counter()
        usage = engine.generate(said, view=view, max_tokens=1).usage
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "from_memory": usage.reused_tokens >= usage.pack_tokens > 0}

    def cut(text: str, tokens: int) -> dict[str, Any]:
        """The first words of `text` that make a prompt of `tokens` tokens."""
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        for count in range(tokens, 0, -1):
            said = engine.tokenizer.decode(ids[:count])
            prompt = engine.template.render(said)
            if len(prompt) == tokens:
                return {"text": said, "ids": list(prompt.token_ids)}
        raise ValueError(f"The text of {len(ids)} tokens gives no prompt of {tokens}; expected a longer text.")

    def prefill(said: str) -> dict[str, Any]:
        began = time.perf_counter()
        engine.prefill(said, reuse=False)
        return {"seconds": time.perf_counter() - began}

    def decode(said: str, tokens: int) -> dict[str, Any]:
        """Seconds a token behind `said`, between the first of an answer and the last."""
        at, stream = [], engine.stream(said, view=view, max_tokens=tokens)
        at += [time.perf_counter() for _ in stream.deltas()]
        return {"seconds": (at[-1] - at[0]) / (stream.result().usage.completion_tokens - 1)}

    def users(said: str, count: int, tokens: int) -> dict[str, Any]:
        """Seconds a token of all answers to as many users at once, each with a question of their own behind `said`."""
        asked = {user: f"{said}\n\nUser {user} asks: tell a long story about what you read." for user in range(count)}
        began = time.perf_counter()
        answers = dict(engine.generate_many(asked, view=view, max_tokens=tokens, at_once=count, progress=False))
        seconds = time.perf_counter() - began
        return {"seconds": seconds / sum(answer.usage.completion_tokens for answer in answers.values())}

    return {
        "pack": pack,
        "first_token": first_token,
        "cut": cut,
        "prefill": prefill,
        "decode": decode,
        "users": users,
    }


def plain(model: str, dtype: str, device: str) -> _Commands:
    """What plain transformers answers."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()

    @torch.inference_mode()
    def forward(ids: list[int]) -> dict[str, Any]:
        began = time.perf_counter()
        loaded(input_ids=torch.tensor([ids], device=device), use_cache=True, logits_to_keep=1).logits.cpu()
        return {"seconds": time.perf_counter() - began}

    return {"forward": forward}


def main() -> None:
    """Load, say where `kp_core` comes from, and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="plain transformers in place of an engine")
    for name in ("model", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    arguments = vars(parser.parse_args())
    answers = sys.stdout
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        commands = plain(**arguments) if arguments.pop("plain") else checkout(**arguments, folder=folder)
        print(json.dumps({"kp_core": kp_core.__file__}), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(commands[command.pop("do")](**command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
