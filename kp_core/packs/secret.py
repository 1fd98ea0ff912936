"""The secrets of a store, which make its handles. `docs/format.md` has the rules."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from hashlib import blake2b

from kp_core.errors import PackError
from kp_core.packs.blobs import Blobs

_VARIABLE = "KP_SECRET"
_SECRET_BYTES = 32
_FOLDER = "secrets"
_NAMED = re.compile(rf"{_FOLDER}/[0-9a-f]{{32}}")
_HOW = "a secret of 64 hexadecimal digits, e.g. of `openssl rand -hex 32`, or several, newest first, with commas"


def load_secrets(blobs: Blobs, configured: str | None) -> tuple[bytes, ...]:
    """Return the secrets of the store, the one for new handles first; creates one for an empty folder.

    A folder keeps its secret in a file, unless it is `configured`, as it always is for far storage. Raises `PackError`
    if the place holds other things, if the store was made with another secret, or if its secret is missing.
    """
    text = configured or (os.environ.get(_VARIABLE) if blobs.is_far else None)
    if not text:
        if blobs.is_far:
            raise PackError(
                f"The handles of {blobs} need a secret that is not kept there: set {_VARIABLE}, or pass "
                f"`PackStore(..., secret=...)`: {_HOW}. Keep it: without it the handles mean nothing."
            )
        return (_stored_secret(blobs),)
    words = re.split(r"[\s,]+", text.strip()) if isinstance(text, str) else ()
    if not words or not all(re.fullmatch(f"[0-9a-fA-F]{{{2 * _SECRET_BYTES}}}", word) for word in words):
        raise PackError(f"Got something else as the secret of {blobs}; expected {_HOW}.")
    keys = tuple(map(bytes.fromhex, words))
    _check(blobs, keys)
    return keys


def is_made(blobs: Blobs) -> bool:
    """Whether there is a pack store."""
    return any(key == "secret" or _NAMED.fullmatch(key) for key, _ in blobs.list("secret"))


def _check(blobs: Blobs, given: Sequence[bytes]) -> None:
    """Check the secrets against the names in the store; writes the name of the first one before any pack."""
    names = {key for key, _ in blobs.list(f"{_FOLDER}/") if _NAMED.fullmatch(key)}
    if unknown := names - {name_of(secret) for secret in given}:
        raise PackError(
            f"{blobs} was made with {'another secret' if len(names) == len(unknown) else 'one secret more'} "
            f"({', '.join(sorted(unknown))}). Give the one it was made with, behind the new one while it is rotated."
        )
    if name_of(given[0]) in names:
        return
    if not names:
        _check_empty(blobs)
        if blobs.stat("secret"):
            raise PackError(f"{blobs} has a secret of its own, in the file `secret`; open it without one.")
    blobs.write(name_of(given[0]), [], if_absent=True)


def _stored_secret(blobs: Blobs) -> bytes:
    # The secret is written before any pack, so a folder with files but no secret is not ours, or has lost it.
    if blobs.stat("secret") is None:
        _check_empty(blobs)
        blobs.write("secret", [secrets.token_bytes(_SECRET_BYTES)], if_absent=True)
    secret = bytes(blobs.read("secret"))
    if len(secret) != _SECRET_BYTES:
        raise PackError(
            f"{blobs}/secret has {len(secret)} bytes; expected {_SECRET_BYTES}. Restore it from a backup: "
            "without it the handles of this store mean nothing."
        )
    return secret


def _check_empty(blobs: Blobs) -> None:
    first_key = next((key for key, _ in blobs.list() if key != "lock"), None)
    if first_key is None or blobs.stat("secret"):
        return
    if is_made(blobs):
        raise PackError(f"{blobs} was made with a secret that is not kept there; pass `PackStore(..., secret=...)`.")
    raise PackError(
        f"{blobs} is not empty (it holds {first_key}), and is no store of packs: it has no `secret`. Name a new "
        "folder; if this was a store, restore its secret from a backup: without it the handles mean nothing."
    )


def name_of(secret: bytes) -> str:
    """Return the key of the empty blob that stands for a configured secret."""
    return f"{_FOLDER}/{blake2b(digest_size=16, key=secret, person=b'kp-secret-v1').hexdigest()}"
