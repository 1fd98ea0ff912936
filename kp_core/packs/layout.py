"""The rules of a store that `docs/format.md` sets: its keys, its secret, and what displaces what."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

from kp_core.errors import HandleError, PackError
from kp_core.packs.blobs import Blobs
from kp_core.packs.file import EncodedPack, PackHeader
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack

__all__ = ["displaces", "handle_of", "load_secret", "pack_key", "text_key"]

_FILE = re.compile(r"packs/([^/]+)/[^/]+/([^/]+)\.(?:safetensors|txt)")
_SECRET_BYTES = 32


def pack_key(handle: Handle) -> str:
    """Where the pack lies."""
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.safetensors"


def text_key(handle: Handle) -> str:
    """Where its text lies."""
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.txt"


def handle_of(key: str) -> Handle | None:
    """The handle whose pack or text lies under `key`; `None` for what is not ours."""
    match = _FILE.fullmatch(key)
    with suppress(HandleError):
        return Handle(match[1], match[2]) if match else None
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
    """Whether `pack` belongs in the place of what is stored."""
    if stored is None:
        return True
    if stored.metadata == encoded.metadata or (pack.is_lazy and pack.fingerprint == ModelFingerprint.unknown()):
        return False
    if not pack.is_lazy or stored.content.dtype is None:
        return True
    return (pack.fingerprint, pack.prefix) != (stored.pack.fingerprint, stored.pack.prefix)
