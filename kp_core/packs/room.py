"""Room under the bound of a store: which KV goes first."""

from __future__ import annotations

import logging
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


def make_room(files: PackFiles, uses: LastUse, max_bytes: int, own: tuple[str, ...], size: int) -> None:
    """Drop the KV of the least recently used entries until `size` bytes fit under `packs/`, beside the keys `own`.

    Of a pack's first entry only the KV is dropped, others are deleted. Raises `QuotaError`, and nothing is dropped,
    when it cannot fit.
    """
    blobs = files.blobs
    listed = dict(blobs.list("packs/"))
    present = {key: found for key, found in listed.items() if key not in own}
    used = size + sum(found.size for found in present.values())
    times = uses.times() if used > max_bytes else {}
    entries = {entry: present[key] for key in present if (entry := handle_of(key)) and key == pack_key(*entry)}
    plan: list[tuple[Handle, str, EncodedPack, BlobStat]] = []

    def age(entry: tuple[Handle, str]) -> tuple[float, tuple[Handle, str]]:
        return max(times.get(f"{entry[0]}{entry[1]}", 0), entries[entry].modified), entry

    for handle, slot in sorted(entries, key=age):
        if used <= max_bytes:
            break
        # What cannot be read is left to the next reader of that pack; without its text it is coming or going.
        with suppress(PackError, FileNotFoundError):
            pack, seen = files.look(handle, slot), entries[handle, slot]
            if pack is not None and pack.stored_bytes and text_key(handle) in listed:
                plan.append((handle, slot, encode_pack(pack), seen))
                used -= seen.size if slot else seen.size - plan[-1][2].nbytes
    if used > max_bytes:
        if listed != dict(blobs.list("packs/")):  # Somebody else makes room, too.
            make_room(files, uses, max_bytes, own, size)
            return
        raise QuotaError(
            f"The pack needs {size} bytes. With it, and without the KV of the others, {blobs} would hold "
            f"{used} bytes; max_bytes is {max_bytes}. "
            "Raise max_bytes, remove packs, or put `pack.without_kv()`."
        )
    for handle, slot, lazy, seen in bar_of("Dropping KV", None, "pack", plan):
        logger.info("Dropping the KV of %s%s to make room.", handle, slot)
        if not slot:
            files.replace(handle, lazy, seen)
        elif blobs.stat(pack_key(handle, slot)) == seen:
            blobs.delete(pack_key(handle, slot))
