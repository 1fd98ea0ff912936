"""What a server does before it answers a prompt with moved packs: they are compiled, and what is between computed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altering import Step, computed_before, need_namespace, readable
from kp_core.engines.vllm.desk import Desk, need_write
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.engines.vllm.spliced import Spliced
from kp_core.engines.vllm.wire import App, HTTPError, Scope
from kp_core.errors import HandleError
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey

__all__ = ["spliced"]


async def spliced(desk: Desk, app: App, scope: Scope, access: Access, body: dict[str, Any]) -> tuple[Rights, int]:
    """The rights of a request that moves packs, and how many tokens were computed for it beforehand.

    `body` is that of `/v1/completions`, whose field `kp` is taken out. A pack that the server has not compiled yet is
    compiled, if the key may write; text before a moved pack is computed unless it is kept. Raises `HTTPError`, and
    errors of ours for what cannot be read.
    """
    need_namespace(access, "what is between moved packs")
    if desk.immovable:
        raise HTTPError(400, desk.immovable)
    ids: Any = body.get("prompt")
    asked = Spliced.of(body.pop("kp"), ids)
    packs = [await asyncio.to_thread(_pack, desk, access, each, ids) for each in asked.moved]
    prefix = packs[0].prefix
    if other := next((pack for pack in packs if pack.prefix != prefix), None):
        raise HTTPError(
            400,
            f"Got packs compiled behind {len(prefix)} and behind {len(other.prefix)} tokens, or others; a composer "
            "that moves packs expects one prefix. Build all with the same `compiled_for`.",
        )
    named = await asyncio.to_thread(readable, asked.packs, desk, access)
    found = replace(asked, prefix=prefix.token_ids, cuts=prefix.cuts, packs=named)
    computed = 0
    for (_, _, handle), pack in zip(asked.moved, packs, strict=True):
        if not await asyncio.to_thread(desk.is_compiled, Handle.parse(handle), pack.key):
            need_write(access)
            await desk.fill(app, scope, access, pack)
            computed += len(pack.token_ids)  # Not what stands before them once more.
    # One salt for all steps: the next one finds in vLLM's own cache what the one before brought there.
    salt = salt_of(access.namespaces, desk.key, found.label)
    steps: list[Step] = []
    for _, stop in found.between:
        step = found.until(stop, ids)
        key = step.leaves(desk.identity, access.namespaces, ids[:stop]).key
        steps.append((key, ids[:stop], Rights(access.namespaces, salt, altered=step)))
    computed += await computed_before(desk, app, scope, access, steps, "What is between moved packs")
    return Rights(access.namespaces, salt, altered=found), computed


def _pack(desk: Desk, access: Access, moved: tuple[int, int, str], ids: list[int]) -> KnowledgePack:
    """The pack that a client names, where the key may read it and its tokens stand there."""
    (start, stop, name), pack = moved, None
    with suppress(HandleError):
        handle = Handle.parse(name)
        if handle.namespace in access.namespaces and handle in desk.store:
            pack = desk.store.peek(handle, PackKey(desk.identity))
    if pack is None:
        raise HTTPError(404, f"There is no pack {name!r}.")
    if pack.fingerprint != desk.identity or list(pack.token_ids) != ids[start:stop]:
        raise HTTPError(
            409,
            f"{name} is not, as this server would compile it, what stands at the tokens {start}:{stop}. Build it with "
            "this server's engine, or use composer='exact'.",
        )
    return pack
