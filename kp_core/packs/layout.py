"""The rules of a store that `docs/format.md` sets: its keys, its secret, and what displaces what."""

from __future__ import annotations

import re
import secrets
import struct
from contextlib import suppress
from hashlib import blake2b

from kp_core.errors import HandleError, PackError
from kp_core.packs.blobs import Blobs
from kp_core.packs.file import EncodedPack, PackHeader
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix

__all__ = ["displaces", "handle_of", "is_spare", "load_secret", "pack_key", "slots", "text_key"]

_FILE = re.compile(r"packs/([^/]+)/[^/]+/([^/.]+)((?:\.[0-9a-f]{16}){0,2})\.(?:safetensors|txt)")
_SECRET_BYTES = 32


def pack_key(handle: Handle, slot: str = "", root: str = "packs") -> str:
    """Where the pack lies, or another entry of its text, whose `slot` is its name."""
    return f"{root}/{handle.namespace}/{handle.id[:2]}/{handle.id}{slot}.safetensors"


def slots(key: PackKey) -> tuple[str, str]:
    """Where an entry may lie beside the first one of its text: the first of its model, and one behind its prefix."""
    of_model = f".{blake2b(key.model.id.encode(), digest_size=8).hexdigest()}"
    prefix = key.prefix or Prefix()
    numbers = (len(prefix), *prefix.token_ids, *prefix.cuts)
    behind = blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8)
    return of_model, f"{of_model}.{behind.hexdigest()}"


def text_key(handle: Handle) -> str:
    """Where its text lies."""
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.txt"


def handle_of(key: str) -> tuple[Handle, str] | None:
    """The handle and the slot whose pack or text lies under `key`; `None` for what is not ours."""
    match = _FILE.fullmatch(key)
    with suppress(HandleError):
        return (Handle(match[1], match[2]), match[3]) if match else None
    return None


def load_secret(blobs: Blobs) -> bytes:
    """The secret of the store, made where there is nothing; raises `PackError` where there are other things."""
    # It comes before any pack: what holds something but no secret was not made here, or has lost it.
    if blobs.stat("secret") is None:
        found = next((key for key, _ in blobs.list() if key != "lock"), None)
        if found and blobs.stat("secret") is None:
            raise PackError(
                f"{blobs} is not empty (it holds {found}), and is no store of packs: it has no `secret`. Name a new "
                "folder; if this was a store, restore its secret from a backup: without it the handles mean nothing."
            )
        blobs.write("secret", [secrets.token_bytes(_SECRET_BYTES)], if_absent=True)
    secret = bytes(blobs.read("secret"))
    if len(secret) != _SECRET_BYTES:
        raise PackError(
            f"{blobs}/secret has {len(secret)} bytes; expected {_SECRET_BYTES}. Restore it from a backup: "
            "without it the handles of this store mean nothing."
        )
    return secret


def displaces(pack: KnowledgePack, encoded: EncodedPack, stored: PackHeader | None) -> bool:
    """Whether `pack` belongs in the place of the entry that is stored there."""
    if stored is None:
        return True
    if stored.metadata == encoded.metadata or (pack.is_lazy and pack.fingerprint == ModelFingerprint.unknown()):
        return False
    return not pack.is_lazy or stored.content.dtype is None or is_spare(stored.pack)


def is_spare(pack: KnowledgePack) -> bool:
    """Whether no model of today can use what is stored: it was recovered from its text, or an early release made it."""
    return pack.fingerprint == ModelFingerprint.unknown() or pack.fingerprint.is_legacy
