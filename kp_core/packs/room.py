"""Room under the bound of a store: which KV goes first."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from kp_core.errors import PackError, QuotaError
from kp_core.packs.blobs import BlobStat
from kp_core.packs.file import EncodedPack, encode_pack
from kp_core.packs.files import PackFiles
from kp_core.packs.handle import Handle
from kp_core.packs.layout import handle_of, pack_key, text_key
from kp_core.packs.uses import LastUse
from kp_core.progress import bar_of

__all__ = ["make_room"]

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 2.0
"""How long an entry that another writer is putting or removing is waited for, since anything last changed."""
_STEP_SECONDS = 0.01


def make_room(files: PackFiles, uses: LastUse, max_bytes: int, own: tuple[str, ...], size: int) -> None:
    """Drop the KV of the least recently used entries until `size` bytes fit under `packs/`, beside the keys `own`.

    Of a pack's first entry only the KV is dropped, others are deleted. Raises `QuotaError`, and nothing is dropped,
    when it cannot fit. Entries that another writer is putting or removing are waited for first.
    """
    blobs = files.blobs
    listed, changed = dict(blobs.list("packs/")), time.monotonic()
    while True:
        used = size + sum(found.size for key, found in listed.items() if key not in own)
        plan, freed, is_settled = _plan(files, uses, listed, own, used - max_bytes)
        if used - freed <= max_bytes:
            break
        if not is_settled:
            time.sleep(_STEP_SECONDS)
        before, listed = listed, dict(blobs.list("packs/"))
        if listed != before:  # Somebody else makes room, too, or puts or removes a pack.
            changed = time.monotonic()
        elif is_settled or time.monotonic() > changed + _SETTLE_SECONDS:
            raise QuotaError(
                f"The pack needs {size} bytes. With it, and without the KV of the others, {blobs} would hold "
                f"{used - freed} bytes; max_bytes is {max_bytes}. "
                "Raise max_bytes, remove packs, or put `pack.without_kv()`."
            )
    for handle, slot, lazy, seen in bar_of("Dropping KV", None, "pack", plan):
        logger.info("Dropping the KV of %s%s to make room.", handle, slot)
        if not slot:
            files.replace(handle, lazy, seen)
        elif blobs.stat(pack_key(handle, slot)) == seen:
            blobs.delete(pack_key(handle, slot))


def _plan(
    files: PackFiles, uses: LastUse, listed: Mapping[str, BlobStat], own: tuple[str, ...], needed: int
) -> tuple[list[tuple[Handle, str, EncodedPack, BlobStat]], int, bool]:
    """The entries to drop until `needed` bytes are free, the bytes that they free, and whether the store is settled.

    Each entry is its handle, slot, pack without KV, and version. The store is not settled where an entry was passed
    over because it cannot be read yet, or has no text yet.
    """
    times = uses.times() if needed > 0 else {}
    entries = {
        entry: found
        for key, found in listed.items()
        if key not in own and (entry := handle_of(key)) and key == pack_key(*entry)
    }
    plan: list[tuple[Handle, str, EncodedPack, BlobStat]] = []
    freed, is_settled = 0, True

    def age(entry: tuple[Handle, str]) -> tuple[float, tuple[Handle, str]]:
        return max(times.get(f"{entry[0]}{entry[1]}", 0), entries[entry].modified), entry

    for handle, slot in sorted(entries, key=age):
        if freed >= needed:
            break
        with suppress(PackError, FileNotFoundError):  # What a later release wrote stays.
            pack, seen = files.look(handle, slot), entries[handle, slot]
            if pack is None or (pack.stored_bytes and text_key(handle) not in listed):
                is_settled = False
            elif pack.stored_bytes:
                plan.append((handle, slot, encode_pack(pack), seen))
                freed += seen.size if slot else seen.size - plan[-1][2].nbytes
    return plan, freed, is_settled
