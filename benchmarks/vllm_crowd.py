"""Many clients at once on `kp serve`, beside the same requests one at a time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from benchmarks.vllmserver import KpServer

__all__ = ["crowded"]

_CLIENTS = 50
_TIE = 0.05
"""The most that the logits of the two likeliest tokens are apart where rounding may decide between them."""


def crowded(
    server: KpServer, namespace: str, asked: Sequence[tuple[str, str]], count: int, tokens: int = 16
) -> dict[str, float]:
    """`count` requests of 50 clients, each about one of these texts, by its handle, with a question about it.

    `lost` are those that got no answer. `wrong` are answers that are not what the server says to the same request
    alone; those that differ first where the two likeliest tokens were as good as equal are `ties` instead.
    """
    with httpx.Client(
        base_url=server.url, headers={"authorization": f"Bearer {server.keys[namespace]}"}, timeout=600
    ) as client:
        contents = [f"{_handle(client, namespace, text)}\n{question}" for text, question in asked]

        def ask(content: str) -> tuple[list[dict[str, Any]] | None, float]:
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": tokens}
            began = time.perf_counter()
            try:
                done = client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 2})
                done.raise_for_status()
            except httpx.HTTPError:
                return None, time.perf_counter() - began
            return done.json()["choices"][0]["logprobs"]["content"], time.perf_counter() - began

        alone = {content: ask(content)[0] or [] for content in contents}
        jobs = list(itertools.islice(itertools.cycle(contents), count))
        random.Random(7).shuffle(jobs)  # noqa: S311 - no cryptography
        with ThreadPoolExecutor(_CLIENTS) as pool:
            answers = list(zip(jobs, pool.map(ask, jobs), strict=True))
    kinds = ["lost" if said is None else _kind(alone[job], said) for job, (said, _) in answers]
    seconds = float(np.percentile([took for _, (_, took) in answers], 90))
    return {"requests": count, **{kind: kinds.count(kind) for kind in ("lost", "wrong", "ties")}, "p90_s": seconds}


def _handle(client: httpx.Client, namespace: str, text: str) -> str:
    done = client.post("/v1/packs", json={"text": text, "namespace": namespace})
    done.raise_for_status()
    return str(done.json()["handle"])


def _kind(alone: Sequence[dict[str, Any]], said: Sequence[dict[str, Any]]) -> str:
    for one, other in itertools.zip_longest(alone, said):
        if one is None or other is None:
            return "wrong"
        if one["token"] != other["token"]:
            first, second = (each["logprob"] for each in one["top_logprobs"])
            return "ties" if first - second < _TIE else "wrong"
    return "equal"
