"""What a server does before it answers a prompt whose KV is altered: what that is made from is computed and kept."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kp_core.compose.packet import PacketComposer
from kp_core.compose.wrapper import wrapper_of
from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altered import COMPUTED, Altered
from kp_core.engines.vllm.desk import Desk, need_write
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.engines.vllm.spliced import Spliced, Wrapping
from kp_core.engines.vllm.wire import App, HTTPError, Scope, Send
from kp_core.errors import HandleError
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.kept import KeptEntry
from kp_core.packs.pack import KnowledgePack, PackKey

__all__ = ["counted", "prepared"]

_MOST_BYTES = 8 * 2**20
_Step: TypeAlias = tuple[KeptEntry, list[int] | Tensor, Rights]
"""What has to be kept, the prompt that is computed for it, and with which rights."""


async def prepared(desk: Desk, app: App, scope: Scope, access: Access, body: dict[str, Any]) -> tuple[Rights, int]:
    """The rights of a request that steers or moves packs, and how many tokens were computed for it beforehand.

    `body` is that of `/v1/completions`, whose field `kp` is taken out. Steered blocks, and text before moved packs,
    cost nothing where their KV is kept; for the others the server is asked once for each, in order. A moved pack that
    the server has not compiled yet is compiled, if the key may write. Raises `HTTPError`, and errors of ours for what
    cannot be read.
    """
    said: Any = body.pop("kp")
    ids: Any = body.get("prompt")  # Checked when `said` is read.
    moves = isinstance(said, dict) and "moved" in said
    what = "between moved packs" if moves else "to be steered"
    if not access.namespaces:
        raise HTTPError(403, f"This key reads no namespace, and what is {what} is kept in one.")
    steps, computed = list[_Step](), 0
    if moves:
        moved, computed = await _moved(desk, app, scope, access, said, ids)
        rights = _rights(desk, access, moved)
        for _, stop in moved.between:
            step = moved.until(stop, ids)
            key = step.leaves(desk.identity, access.namespaces, ids[:stop]).key
            # One salt for all: the next step finds in vLLM's own cache what the one before brought there.
            steps.append((key, ids[:stop], replace(rights, altered=step)))
    else:
        steered = Altered.of(said, ids, desk.identity)
        steered = replace(steered, packs=await asyncio.to_thread(_readable, steered.packs, desk, access))
        rights = _rights(desk, access, steered)
        for number, (_, stop, _) in enumerate(steered.blocks):
            below = steered.until(number, ids)
            key = below.leaves(desk.identity, access.namespaces, ids[:stop]).key
            # A salt for each: the block is computed plain, and altered for the next step.
            steps.append((key, ids[:stop], _rights(desk, access, below)))
    computed += await _computed(desk, app, scope, steps, f"What is {what}", last_is_all=not moves)
    return rights, computed


def counted(send: Send, computed: int) -> Send:
    """`send` with a header that says how many tokens were computed beforehand."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (COMPUTED.encode(), str(computed).encode())]
            message = {**message, "headers": headers}
        await send(message)

    return sent


async def _computed(  # noqa: PLR0913 - what a request comes with, and what it needs
    desk: Desk, app: App, scope: Scope, steps: Sequence[_Step], what: str, *, last_is_all: bool = False
) -> int:
    """Have the server compute and keep those of `steps` that are not kept, in order; how many tokens it computed.

    With `last_is_all` a step that is kept makes up for those before it. Raises `HTTPError`, which begins with `what`.
    """

    def missing() -> list[_Step]:
        found = list[_Step]()
        for key, prompt, rights in reversed(steps):
            if not desk.store.kept.has(key, rights.namespaces):
                found.append((key, prompt, rights))
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


def _rights(desk: Desk, access: Access, altered: Altered | Spliced) -> Rights:
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


async def _moved(  # noqa: PLR0913 - what a request comes with
    desk: Desk, app: App, scope: Scope, access: Access, said: dict[str, Any], ids: list[int]
) -> tuple[Spliced, int]:
    """The packs that a client names as moved, all compiled, and how many tokens were computed for that."""
    if desk.immovable:
        raise HTTPError(400, desk.immovable)
    asked = Spliced.of(said, ids)
    packs = [await asyncio.to_thread(_pack, desk, access, handle) for _, _, handle in asked.moved]
    prefix = packs[0].prefix
    if other := next((pack for pack in packs if pack.prefix != prefix), None):
        raise HTTPError(
            400,
            f"Got packs compiled behind {len(prefix)} and behind {len(other.prefix)} tokens, or others; a composer "
            "that moves packs expects one prefix. Build all with the same `compiled_for`.",
        )
    named = await asyncio.to_thread(_readable, asked.packs, desk, access)
    found = replace(asked, prefix=prefix.token_ids, packs=named)
    soft = _soft(desk, said.get("wrapper"))
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
    return found, computed


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
    await _computed(desk, app, scope, [(left.key, prompt, rights)], "The pack between its soft tokens")
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
