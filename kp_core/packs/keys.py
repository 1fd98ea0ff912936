"""Where the files of a store of packs lie. `docs/format.md` describes them."""

from __future__ import annotations

import re
from contextlib import suppress

from kp_core.errors import PromptError
from kp_core.packs.blobs import Blobs, BlobStat, is_key
from kp_core.packs.handle import Handle

BEHIND = "behind/"
"""Below it lie entries with several owners."""
_EARLIER = "kept/"  # Those of release 0.2, which are not read.
_PACK = re.compile(r"packs/([^/]+)/[^/]+/([^/.]+)(?:\.[0-9a-f]{32}\.safetensors|\.txt)")
_ENTRY_BEHIND = re.compile(r"behind/[0-9a-f]{2}/[0-9a-f]{32}\.safetensors")


def text_key(handle: Handle) -> str:
    """Return the key of the text of a pack."""
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.txt"


def buried_key(handle: Handle) -> str:
    """Return the key of the mark that a pack was deleted."""
    return f"deleted/{handle.namespace}/{handle.id[:2]}/{handle.id}"


def handle_of(key: str) -> Handle | None:
    """Return the handle of the text or of the only owner of the entry at `key`; `None` if `key` is neither."""
    match = _PACK.fullmatch(key)
    with suppress(PromptError):
        return Handle(match[1], match[2]) if match else None
    return None


def own_files(blobs: Blobs, *prefixes: str) -> dict[str, BlobStat]:
    """Return our files, by default all texts and entries.

    Others, such as a `.DS_Store` or what a network drive leaves, are not touched.
    """
    listed = (each for prefix in prefixes or ("packs/", BEHIND) for each in blobs.list(prefix))
    return {
        key: stat for key, stat in listed if (_ENTRY_BEHIND.fullmatch(key) if key.startswith(BEHIND) else is_key(key))
    }


def entries_of(blobs: Blobs, handle: Handle) -> list[str]:
    """Return the keys of the entries that this pack alone owns, and of those of release 0.2."""
    return [key for key in own_files(blobs, text_key(handle).removesuffix("txt")) if not key.endswith(".txt")]


def earlier_of(blobs: Blobs, handle: Handle) -> list[str]:
    """Return what release 0.2 left that may hold the KV of a pack: nobody reads it, and it goes with the pack."""
    left = own_files(blobs, _EARLIER, f"quarantine/{handle.namespace}.{handle.id}.")
    return [key for key in left if key.endswith((".safetensors", ".txt"))]
