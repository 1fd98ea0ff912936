"""What a server does before it answers a steered prompt: KV is computed plain, kept, and altered when it is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altered import COMPUTED, Altered
from kp_core.engines.vllm.desk import Desk
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.engines.vllm.wire import App, HTTPError, Scope, Send
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.kept import EntryKey

__all__ = ["Step", "computed_before", "counted", "need_namespace", "readable", "steered"]

Step: TypeAlias = tuple[EntryKey, list[int] | Tensor, Rights]
"""What has to be kept, the prompt that is computed for it, and with which rights."""


async def steered(desk: Desk, app: App, scope: Scope, access: Access, body: dict[str, Any]) -> tuple[Rights, int]:
    """The rights of a request that steers, and how many tokens were computed for it beforehand.

    `body` is that of `/v1/completions`, whose field `kp` is taken out. Blocks of which KV is kept cost nothing; for the
    others the server is asked once for each, in order. Raises `HTTPError`, and errors of ours for what cannot be read.
    """
    need_namespace(access, "what is steered")
    ids: Any = body.get("prompt")
    altered = Altered.of(body.pop("kp"), ids, desk.identity)
    altered = replace(altered, packs=await asyncio.to_thread(readable, altered.packs, desk, access))
    steps: list[Step] = []
    for number, (_, stop, _) in enumerate(altered.blocks):
        step = altered.until(number, ids)
        below = step.leaves(desk.identity, access.namespaces, ids[:stop])
        steps.append((below.key, ids[:stop], _rights(desk, access, step)))
    computed = await computed_before(desk, app, scope, access, steps, "What is to be steered", last_is_all=True)
    return _rights(desk, access, altered), computed


async def computed_before(  # noqa: PLR0913 - what a request comes with, and what it needs
    desk: Desk,
    app: App,
    scope: Scope,
    access: Access,
    steps: Sequence[Step],
    what: str,
    *,
    last_is_all: bool = False,
) -> int:
    """Have the server compute and keep those of `steps` that are not kept, in order; how many tokens it computed.

    With `last_is_all` a step that is kept makes up for those before it. Raises `HTTPError`, which begins with `what`.
    """

    def missing() -> list[Step]:
        found: list[Step] = []
        for step in reversed(steps):
            if not desk.store.kept.has(step[0], access.namespaces):
                found.append(step)
            elif last_is_all:
                break
        return found[::-1]

    computed = 0
    for _, prompt, rights in await asyncio.to_thread(missing):
        computed += await desk.prefill(app, scope, prompt, rights, f"{what} could not be computed")
    if await asyncio.to_thread(missing):
        raise HTTPError(
            507,
            f"{what} could not be kept in the store: it is full, cannot be written, or the server has several ranks.",
        )
    return computed


def need_namespace(access: Access, what: str) -> None:
    """Raise `HTTPError` for a key with no namespace in which `what` could be kept."""
    if not access.namespaces:
        raise HTTPError(403, f"This key reads no namespace, and {what} is kept in one.")


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


def readable(packs: tuple[tuple[str, int], ...], desk: Desk, access: Access) -> tuple[tuple[str, int], ...]:
    """Those of the packs named that the key reads and that are stored; others count nothing."""
    named = [(handle, start) for handle, start in packs if find_handles(handle)]
    found = {handle: Handle.parse(handle) for handle, _ in named}
    return tuple(
        (handle, start)
        for handle, start in named
        if found[handle].namespace in access.namespaces and found[handle] in desk.store
    )
