"""The rules of a store that `docs/format.md` sets: its keys, and what displaces what."""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from hashlib import blake2b

from kp_core.errors import HandleError
from kp_core.packs.file import EncodedPack, PackHeader
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix

__all__ = ["displaces", "handle_of", "is_spare", "is_text_alone", "pack_key", "slots", "text_key"]

_FILE = re.compile(r"packs/([^/]+)/[^/]+/([^/.]+)((?:\.[0-9a-f]{16}){0,2})\.(?:safetensors|txt)")


def pack_key(handle: Handle, slot: str = "", root: str = "packs") -> str:
    """Where the pack lies, or another entry of its text, whose `slot` is its name."""
    return f"{root}/{handle.namespace}/{handle.id[:2]}/{handle.id}{slot}.safetensors"


def slots(key: PackKey) -> tuple[str, str]:
    """Where an entry may lie beside the first one of its text: the first of its model, and one behind its prefix."""
    of_model = f".{blake2b(key.model.id.encode(), digest_size=8).hexdigest()}"
    prefix = key.prefix or Prefix()
    numbers = (len(prefix), *prefix.token_ids)
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


def displaces(pack: KnowledgePack, encoded: EncodedPack, stored: PackHeader | None) -> bool:
    """Whether `pack` belongs in the place of the entry that is stored there."""
    if stored is None:
        return True
    if stored.metadata == encoded.metadata or is_text_alone(pack):
        return False
    return not pack.is_lazy or stored.content.dtype is None or is_spare(stored.pack, pack.fingerprint)


def is_spare(stored: KnowledgePack, model: ModelFingerprint) -> bool:
    """Whether `model` needs nothing of it: it was recovered from its text, or an earlier release of `model` made it.

    What an earlier release made for another model stays, as it says that the text is for that model too.
    """
    made = stored.fingerprint
    return made == ModelFingerprint.unknown() or (made.is_earlier and made.same_model(model))


def is_text_alone(pack: KnowledgePack) -> bool:
    """Whether it has neither KV nor a model that it is to be computed by."""
    return pack.is_lazy and pack.fingerprint == ModelFingerprint.unknown()
