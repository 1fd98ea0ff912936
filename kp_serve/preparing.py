"""Preparation of prompts with altered KV (steered blocks, moved packs): the server computes and keeps their parts."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kp_core import Handle, ModelFingerprint, Region
from kp_core.packs.entry import Entry, digest_of
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.prompt.prompt import SoftTokens
from kp_serve.asked import Placed, blocks_as_json, moved_packs, soft_of, steered
from kp_serve.rights import Rights, salt_of
from kp_serve.state import ServerState
from kp_serve.stored import Part
from kp_serve.wire import Access, HTTPError, Visit

_Step: TypeAlias = tuple[list[int] | Tensor, Rights]
"""A prompt, and the rights with which it is computed."""


async def prepared(desk: ServerState, visit: Visit, body: dict[str, Any]) -> tuple[Rights, int]:
    """Prepare a request that steers or moves packs. Returns its rights, and the number of tokens computed for it.

    `body` is that of `/v1/completions`; its field `kp` is removed. Steered blocks, and text before moved packs, cost
    nothing if their KV is kept; the server computes the others one by one, in order. A moved pack that is not compiled
    yet is compiled, if the key may write. Raises `HTTPError`, and `KnowledgePackError` for a `kp` that cannot be read.
    """
    kp_options: Any = body.pop("kp")
    ids: Any = body.get("prompt")  # Checked when `said` is read.
    moves = isinstance(kp_options, dict) and "moved" in kp_options
    purpose = "between moved packs" if moves else "to be steered"
    if not visit.access.namespaces:
        raise HTTPError(403, f"This key reads no namespace, and what is {purpose} is kept in one.")
    if moves:
        steps, computed = await _moved(desk, visit, kp_options, ids)
    else:
        blocks, packs = steered(kp_options, ids, desk.identity)
        packs = await asyncio.to_thread(_readable, packs, desk, visit.access)
        steps = steered_steps(visit.access.namespaces, desk.key, desk.identity, ids, blocks, packs)
        computed = 0
    *earlier, (_, rights) = steps
    computed += await _computed(desk, visit, earlier, f"What is {purpose}", last_is_all=not moves)
    return rights, computed


def steered_steps(  # noqa: PLR0913 - a prompt, and who asks
    names: tuple[str, ...],
    key: bytes,
    model: ModelFingerprint,
    ids: list[int],
    blocks: Sequence[Region],
    packs: Placed,
) -> list[_Step]:
    """The requests for a prompt with steered blocks: one for each block, then the client's own.

    A block is computed as if nothing in it were steered, and then altered; tokens behind it see the altered KV. A
    server computes no token twice in one pass. So each request computes up to the end of one block, behind the blocks
    before it, and this KV is kept. The next request loads it, alters the block, and goes on.
    """
    steps, parts = list[_Step](), tuple[Part, ...]()
    for number, block in enumerate(blocks):
        prefix_ids, label = ids[: block.stop], _label(blocks[:number], packs)
        kept_part = _kept(names, model, label, prefix_ids, 0, packs)
        # One salt per step: a block is plain in its own step, and altered in the next.
        steps.append(_step(names, salt_of(names, key, label), prefix_ids, parts, kept_part))
        parts = (replace(kept_part, block=json.dumps(blocks_as_json([block]))),)
    return [*steps, _step(names, salt_of(names, key, _label(blocks, packs)), ids, parts)]


def laid_steps(names: tuple[str, ...], key: bytes, ids: list[int], moved: Sequence[Part], packs: Placed) -> list[_Step]:
    """The requests for a prompt with moved packs: one for each text before a pack, then the client's own.

    Such a text is computed behind everything before it. A server computes only what follows the loaded KV. So each
    request computes one text, behind the packs and texts before it, and its KV is kept.
    """
    labels = ["splice", *(f"{part.start}:{part.entry.key}" for part in moved)]
    # One salt for all steps: each finds in vLLM's prefix cache what the step before left there.
    salt = salt_of(names, key, "\0".join(labels))
    steps, parts, position = list[_Step](), list[Part](), 0
    for number, part in enumerate(moved):
        if position < part.start:
            prefix_ids, label = ids[: part.start], "\0".join(labels[: number + 1]) if number else ""
            kept_part = _kept(names, part.entry.model, label, prefix_ids, position, packs)
            steps.append(_step(names, salt, prefix_ids, parts, kept_part))
            parts.append(kept_part)
        parts.append(part)
        position = part.stop
    return [*steps, _step(names, salt, ids, parts)]


def _step(
    names: tuple[str, ...], salt: str, ids: list[int], begins: Sequence[Part], keeps: Part | None = None
) -> _Step:
    return ids, Rights(names, salt, tokens=digest_of(ids), begins=tuple(begins), keeps=keeps)


def _label(blocks: Sequence[Region], packs: Placed) -> str:
    """Label of what is steered in a prompt, and where. In prompts with one label, equal ids have equal KV."""
    names = [f"{block.start}:{block.stop}:{block.label}" for block in blocks]
    return "\0".join([*names, *sorted(handle for handle, start in packs if blocks and start < blocks[-1].stop)])


def _kept(  # noqa: PLR0913 - what an entry is of
    names: tuple[str, ...], model: ModelFingerprint, label: str, ids: list[int], start: int, packs: Placed
) -> Part:
    """The tokens of `ids` from `start` on, as a part to keep. `label` says how the KV before them is altered."""
    before = blake2b(f"{label}\0{digest_of(ids[:start])}".encode(), digest_size=16).hexdigest()
    # Readers of other namespaces have other entries, so that durations do not reveal what others ask.
    owners = frozenset((*names, *(handle for handle, at in packs if at < len(ids))))
    return Part(start, Entry(model, start, before, tuple(ids[start:]), owners))


async def _computed(
    desk: ServerState, visit: Visit, steps: Sequence[_Step], what: str, *, last_is_all: bool = False
) -> int:
    """Have the server compute and keep those of `steps` that are not kept, in order. Returns the number of computed
    tokens.

    With `last_is_all`, a kept step includes those before it. Raises `HTTPError` with a message that begins with `what`.
    """

    def missing() -> list[_Step]:
        missing_steps = list[_Step]()
        for prompt, rights in reversed(steps):
            if rights.keeps and not desk.store.has(rights.keeps.entry, rights.namespaces):
                missing_steps.append((prompt, rights))
            elif last_is_all:
                break
        return missing_steps[::-1]

    computed = 0
    for prompt, rights in await asyncio.to_thread(missing):
        computed += await desk.prefill(visit, prompt, rights, f"{what} could not be computed")
    if await asyncio.to_thread(missing):
        raise HTTPError(
            507,
            f"{what} could not be kept in the store: it is full, cannot be written, or the server has several ranks.",
        )
    return computed


def _readable(packs: Placed, desk: ServerState, access: Access) -> Placed:
    """The packs among `packs` that are stored and that the key may read; others are ignored."""

    def may_read(name: str) -> bool:
        with suppress(HTTPError):
            return bool(desk.handle(name, access))
        return False

    return tuple((handle, start) for handle, start in packs if may_read(handle))


async def _moved(desk: ServerState, visit: Visit, field: dict[str, Any], ids: list[int]) -> tuple[list[_Step], int]:
    """Compile the moved packs. Returns the requests for the prompt, and the number of tokens computed so far."""
    if desk.immovable:
        raise HTTPError(400, desk.immovable)
    spans, starts = moved_packs(field, ids)
    packs = [await asyncio.to_thread(_pack, desk, visit.access, handle) for _, _, handle in spans]
    prefix = packs[0].prefix
    if odd_pack := next((pack for pack in packs if pack.prefix != prefix), None):
        raise HTTPError(
            400,
            f"Got packs compiled behind {len(prefix)} and behind {len(odd_pack.prefix)} tokens, or others; a composer "
            "that moves packs expects one prefix. Build all with the same `compiled_for`.",
        )
    starts = await asyncio.to_thread(_readable, starts, desk, visit.access)
    if field.get("soft") is not None and not desk.packets:
        raise HTTPError(400, "This server wraps no packs; start it with `kp serve --packets`.")
    soft = None if field.get("soft") is None else soft_of(field["soft"])
    for (start, stop, handle), pack in zip(spans, packs, strict=True):
        if not _stands(desk, pack, ids[start:stop], soft):
            raise HTTPError(
                409,
                f"{handle} is not, as this server would compile it, what stands at the tokens {start}:{stop}. Build it "
                "with this server's engine, or use composer='exact'.",
            )
    parts, computed = list[Part](), 0
    for (start, stop, handle), pack in zip(spans, packs, strict=True):
        span_ids = tuple(ids[start:stop])
        if soft is not None:
            part = Part(start, Entry.of_pack(handle, desk.identity, prefix, span_ids, soft.id))
            computed += await _softened(desk, visit, part, prefix, soft)
            parts.append(part)
            continue
        stored = await asyncio.to_thread(desk.store.peek, Handle.parse(handle), pack.key)
        if stored is None or not pack.key.fits(stored) or not stored.stored_bytes:
            visit.need_write()
            await desk.fill(visit, pack)
            computed += len(span_ids)  # Without the prefix, which is not counted again.
        parts.append(Part(start, Entry.of_pack(handle, desk.identity, prefix, span_ids)))
    return laid_steps(visit.access.namespaces, desk.key, ids, parts, starts), computed


async def _softened(desk: ServerState, visit: Visit, part: Part, prefix: Prefix, soft: SoftTokens) -> int:
    """Have a pack compiled between its soft tokens, unless it is kept. Returns the number of computed tokens."""
    if await asyncio.to_thread(desk.store.has, part.entry, visit.access.namespaces):
        return 0
    visit.need_write()
    prompt = await asyncio.to_thread(_embedded, desk, prefix, part.entry.token_ids, soft)
    # A random salt: KV of embeddings, which have no token ids, is found only in the store.
    kept_part = replace(part, start=part.entry.at)
    rights = Rights(visit.access.namespaces, secrets.token_hex(16), tokens=digest_of(()), keeps=kept_part)
    await _computed(desk, visit, [(prompt, rights)], "The pack between its soft tokens")
    return len(part.entry.token_ids)


def _embedded(desk: ServerState, prefix: Prefix, token_ids: tuple[int, ...], soft: SoftTokens) -> Tensor:
    """Input embeddings of a prefix and a pack between soft tokens, `(tokens, hidden)`."""
    tokens = desk.embeddings([*prefix, *soft.between(token_ids)])
    if soft.header.shape[1] != tokens.shape[1]:
        raise HTTPError(400, f"Got soft tokens of width {soft.header.shape[1]}; this model has {tokens.shape[1]}.")
    parts = (tokens[: len(prefix)], soft.header, tokens[len(prefix) :], soft.trailer)
    dtype: torch.dtype = getattr(torch, desk.identity.dtype)
    return torch.cat([part.to(tokens.dtype) for part in parts]).to(dtype)


def _stands(desk: ServerState, pack: KnowledgePack, ids: list[int], soft: SoftTokens | None) -> bool:
    """Whether `ids` are the tokens of the pack; a wrapped pack also holds the end of its text, and blanks behind it."""
    if pack.fingerprint != desk.identity:
        return False
    if soft is None:
        return list(pack.token_ids) == ids
    text_ids = soft.between(tuple(ids))
    suffix = text_ids[len(pack.token_ids) :]
    ends_alike = pack.text.rstrip().endswith(desk.tokenizer.decode(suffix).strip())
    is_own = ends_alike and text_ids[: len(pack.token_ids)] == pack.token_ids
    return bool(text_ids) and is_own and soft.around(text_ids) == tuple(ids)


def _pack(desk: ServerState, access: Access, name: str) -> KnowledgePack:
    """The pack of a handle, if the key may read it. Raises `HTTPError` 404."""
    pack = desk.store.peek(desk.handle(name, access), PackKey(desk.identity))
    if pack is None:  # It was deleted meanwhile.
        raise HTTPError(404, f"There is no pack {name!r}.")
    return pack
