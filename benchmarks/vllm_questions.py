"""Answers of `kp serve` with packs that are read from its store, beside those with the text, cold and warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import httpx

from benchmarks.vllmserver import KpServer

__all__ = ["compared"]

_TOKENS = 24


def compared(server: KpServer, prompts: Sequence[Sequence[int]], restart: Callable[[], None]) -> dict[str, float]:
    """How many greedy answers are the same: with a pack and with the text cold, and with the text cold and warm.

    The packs are in the store of the namespace `packs`, and leave the memory of the server with `restart`. `margin` is
    the largest distance between the two likeliest tokens where answers part, `rounding` the largest difference of one
    token's logarithm of probability before they do; with `text_`, those of the text cold and warm.
    """
    restart()
    found = [[_said(server, way, list(ids)) for way in ("packs", "text", "text")] for ids in prompts]
    figures: dict[str, float] = {"questions": len(found)}
    for name, one, other in (("", 0, 1), ("text_", 2, 1)):
        pairs = [(said[one], said[other]) for said in found]
        parts = [_parts(*pair) for pair in pairs]
        figures |= {
            f"{name}equal": sum(at is None for at in parts),
            f"{name}margin": max(
                (_margin(b, at) for (_, b), at in zip(pairs, parts, strict=True) if at is not None), default=0.0
            ),
            f"{name}rounding": max(_rounding(*pair, at) for pair, at in zip(pairs, parts, strict=True)),
        }
    return figures


def _said(server: KpServer, way: str, ids: list[int]) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": _TOKENS, "temperature": 0, "logprobs": 2}
    headers = {"authorization": f"Bearer {server.keys[way]}"}
    done = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
    done.raise_for_status()
    said: dict[str, Any] = done.json()["choices"][0]["logprobs"]
    return said


def _parts(one: dict[str, Any], other: dict[str, Any]) -> int | None:
    """Where two answers part."""
    if one["tokens"] == other["tokens"]:
        return None
    pairs = zip(one["tokens"], other["tokens"], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _margin(said: dict[str, Any], at: int) -> float:
    likeliest = sorted(said["top_logprobs"][at].values(), reverse=True)
    return float(likeliest[0] - likeliest[1])


def _rounding(one: dict[str, Any], other: dict[str, Any], at: int | None) -> float:
    sides = (each["token_logprobs"][:at] for each in (one, other))
    return max((abs(a - b) for a, b in zip(*sides, strict=True)), default=0.0)
