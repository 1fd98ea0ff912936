"""What a server does before it answers a prompt with moved packs: they are compiled, and what is between computed."""

from __future__ import annotations

import asyncio
import base64
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kp_core.compose.packet import PacketComposer
from kp_core.compose.wrapper import wrapper_of
from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altering import Step, computed_before, need_namespace, readable
from kp_core.engines.vllm.desk import Desk, need_write
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.engines.vllm.spliced import Spliced, Wrapping
from kp_core.engines.vllm.wire import App, HTTPError, Scope
from kp_core.errors import HandleError
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey

__all__ = ["spliced"]

_MOST_BYTES = 8 * 2**20


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
    said = body.pop("kp")
    asked, wrapper = Spliced.of(said, ids), said.get("wrapper")
    packs = [await asyncio.to_thread(_pack, desk, access, handle) for _, _, handle in asked.moved]
    prefix = packs[0].prefix
    if other := next((pack for pack in packs if pack.prefix != prefix), None):
        raise HTTPError(
            400,
            f"Got packs compiled behind {len(prefix)} and behind {len(other.prefix)} tokens, or others; a composer "
            "that moves packs expects one prefix. Build all with the same `compiled_for`.",
        )
    named = await asyncio.to_thread(readable, asked.packs, desk, access)
    found = replace(asked, prefix=prefix.token_ids, packs=named)
    soft = _soft(desk, wrapper)
    if soft is not None:
        found = replace(found, wrapped=soft.key)
    for (start, stop, handle), pack in zip(asked.moved, packs, strict=True):
        if not _stands(desk, pack, ids[start:stop], soft):
            raise HTTPError(
                409,
                f"{handle} is not, as this server would compile it, what stands at the tokens {start}:{stop}. Build it "
                "with this server's engine, or use composer='exact'.",
            )
    computed = 0
    for (start, stop, handle), pack in zip(asked.moved, packs, strict=True):
        if soft is not None:
            made = found.wrapping(handle, tuple(ids[start:stop]))
            computed += await _wrapped(desk, app, scope, access, made, soft)
        elif not await asyncio.to_thread(desk.is_compiled, Handle.parse(handle), pack.key):
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


async def _wrapped(  # noqa: PLR0913 - what a request comes with, and what it needs
    desk: Desk, app: App, scope: Scope, access: Access, made: Wrapping, soft: PacketComposer
) -> int:
    """Have a pack compiled between its soft tokens, unless it is; how many tokens were computed for it."""
    left = made.leaves(desk.identity, access.namespaces)
    if await asyncio.to_thread(desk.store.kept.has, left.key, access.namespaces):
        return 0
    need_write(access)
    prompt = await asyncio.to_thread(_embedded, desk, made, soft)
    # Nobody else has this salt: what is computed of embeddings is found in the store alone.
    rights = Rights(access.namespaces, secrets.token_hex(16), altered=made)
    steps: list[Step] = [(left.key, prompt, rights)]
    await computed_before(desk, app, scope, access, steps, "The pack between its soft tokens")
    return len(made.token_ids)


def _embedded(desk: Desk, made: Wrapping, soft: PacketComposer) -> Tensor:
    """What a wrapped pack and its prefix are for the model, `(tokens, hidden)`."""
    header, trailer = soft.wrapper.header, soft.wrapper.trailer
    inner = made.token_ids[len(header) : len(made.token_ids) - len(trailer)]
    tokens = desk.embeddings([*made.prefix, *inner])
    parts = (tokens[: len(made.prefix)], header, tokens[len(made.prefix) :], trailer)
    dtype: torch.dtype = getattr(torch, desk.identity.dtype)
    return torch.cat([part.to(tokens.dtype) for part in parts]).to(dtype)


def _soft(desk: Desk, said: object) -> PacketComposer | None:
    """The composer of what a client sends as its wrapper; raises `HTTPError` and `WrapperError`."""
    if said is None:
        return None
    if not desk.packets:
        raise HTTPError(400, "This server wraps no packs; start it with `kp serve --packets`.")
    if not isinstance(said, str) or len(said) > _MOST_BYTES:
        raise HTTPError(400, f"Expected a wrapper in base64, of at most {_MOST_BYTES} characters.")
    try:
        wrapper = wrapper_of(base64.b64decode(said, validate=True))
    except ValueError as error:
        raise HTTPError(400, f"Got a wrapper that is not in base64 ({error}).") from error
    wrapper.check(desk.identity)
    return PacketComposer(wrapper)


def _stands(desk: Desk, pack: KnowledgePack, ids: list[int], soft: PacketComposer | None) -> bool:
    """Whether these are the tokens of the pack; wrapped, they go to the end of its text and the blanks behind."""
    if pack.fingerprint != desk.identity:
        return False
    if soft is None:
        return list(pack.token_ids) == ids
    inner = soft.unwrapped(replace(pack, token_ids=tuple(ids), kv=None))
    more = inner[len(pack.token_ids) :]
    ends = pack.text.rstrip().endswith(desk.tokenizer.decode(more).strip())
    is_own = ends and inner[: len(pack.token_ids)] == pack.token_ids
    return bool(inner) and is_own and list(soft.wrap(pack, inner).token_ids) == ids


def _pack(desk: Desk, access: Access, name: str) -> KnowledgePack:
    """The pack of that handle, where the key may read it."""
    pack = None
    with suppress(HandleError):
        handle = Handle.parse(name)
        if handle.namespace in access.namespaces and handle in desk.store:
            pack = desk.store.peek(handle, PackKey(desk.identity))
    if pack is None:
        raise HTTPError(404, f"There is no pack {name!r}.")
    return pack
