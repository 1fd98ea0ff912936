"""What a server does before it answers a steered prompt: KV is computed plain, kept, and altered when it is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any

from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altered import COMPUTED, Altered, Below
from kp_core.engines.vllm.desk import Desk
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.engines.vllm.wire import App, HTTPError, Scope, Send, call
from kp_core.packs.handle import Handle, find_handles

__all__ = ["counted", "steered"]


async def steered(desk: Desk, app: App, scope: Scope, access: Access, body: dict[str, Any]) -> tuple[Rights, int]:
    """The rights of a request that steers, and how many tokens were computed for it beforehand.

    `body` is that of `/v1/completions`, whose field `kp` is taken out. Blocks of which KV is kept cost nothing; for the
    others the server is asked once for each, in order. Raises `HTTPError`, and errors of ours for what cannot be read.
    """
    if not access.namespaces:
        raise HTTPError(403, "This key reads no namespace, and what is steered is kept in one.")
    ids: Any = body.get("prompt")
    altered = Altered.of(body.pop("kp"), ids, desk.identity)
    altered = replace(altered, packs=await asyncio.to_thread(_readable, altered.packs, desk, access))
    steps = [altered.until(number, ids) for number in range(len(altered.blocks))]

    def missing() -> Iterator[int]:
        """The blocks whose KV has to be computed, from the last one on."""
        for number, step in reversed(list(enumerate(steps))):
            below = Below.kept(step, desk.identity, access.namespaces, ids[: altered.blocks[number][1]])
            if desk.store.kept.has(below.key, access.namespaces):
                return
            yield number

    computed = 0
    for number in reversed(await asyncio.to_thread(lambda: list(missing()))):
        rights = _rights(desk, access, steps[number])
        ask = {
            **({"model": body["model"]} if "model" in body else {}),
            "prompt": ids[: altered.blocks[number][1]],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": rights.salt,
            "kv_transfer_params": rights.sign(desk.key),
        }
        status, answer = await call(app, scope, "POST", "/v1/completions", ask)
        if status != 200:
            raise HTTPError(status, f"What is to be steered could not be computed: {answer}")
        usage = answer["usage"]
        computed += usage["prompt_tokens"] - (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if await asyncio.to_thread(lambda: next(missing(), None)) is not None:
        raise HTTPError(
            507,
            "What is to be steered could not be kept in the store: it is full, cannot be written, or the server has "
            "several ranks.",
        )
    return _rights(desk, access, altered), computed


def counted(send: Send, computed: int) -> Send:
    """`send` with a header that says how many tokens were computed beforehand."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (COMPUTED.encode(), str(computed).encode())]
            message = {**message, "headers": headers}
        await send(message)

    return sent


def _rights(desk: Desk, access: Access, altered: Altered) -> Rights:
    salt = salt_of(access.namespaces, desk.key, altered.label)
    return Rights(access.namespaces, salt, altered=altered)


def _readable(packs: tuple[tuple[str, int], ...], desk: Desk, access: Access) -> tuple[tuple[str, int], ...]:
    """Those of the packs named that the key reads and that are stored; others count nothing."""
    named = [(handle, start) for handle, start in packs if find_handles(handle)]
    found = {handle: Handle.parse(handle) for handle, _ in named}
    return tuple(
        (handle, start)
        for handle, start in named
        if found[handle].namespace in access.namespaces and found[handle] in desk.store
    )
