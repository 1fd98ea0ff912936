"""Handles: short strings that stand for packs in messages.

A handle is `kp:<namespace>/<id>`. The id is a BLAKE2b digest of namespace and text, keyed with the secret of the store.
So it is stable within a store, reveals nothing about the text, and cannot be made without the secret.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from kp_core.errors import PromptError

_NAMESPACE = r"[a-z0-9_-]{1,64}"
# 13 bytes make 104 bits, written as 21 characters of base32.
_DIGEST_BYTES, _ID = 13, r"[a-z2-7]{21}"
_JOINTS = (":", "/", "-")  # An incomplete handle may end with these, right before another handle.
# In JSON, and in the `repr` of strings that some frameworks put into prompts, a handle on its own line follows an
# escaped line feed, and so the letter n, r or t. Handles may also stand right behind each other: the id has a fixed
# length.
_START = rf"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt])|(?<=/{_ID}))"
_WHOLE = rf"{_START}kp:({_NAMESPACE})/({_ID})(?:(?![A-Za-z0-9_])|(?=kp:{_NAMESPACE}/{_ID}))"
_PATTERN = re.compile(_WHOLE)
_LIKE = re.compile(rf"{_WHOLE}|{_START}kp:[A-Za-z0-9_-]{{1,64}}/[A-Za-z0-9]{{16,32}}(?![A-Za-z0-9_])")


@dataclass(frozen=True, order=True)
class Handle:
    """A parsed handle; `str(handle)` is the form used in messages."""

    namespace: str
    id: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not isinstance(self.id, str) or not re.fullmatch(_ID, self.id):
            raise PromptError(f"Got the id {self.id!r}; expected 21 characters a-z or 2-7.")

    def __str__(self) -> str:
        return f"kp:{self.namespace}/{self.id}"

    @classmethod
    def parse(cls, text: str | Handle) -> Handle:
        """Parse a handle, or return one as it is; raises `PromptError` if `text` is anything else."""
        if isinstance(text, Handle):
            return text
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise PromptError(f"Got {text!r}; expected a handle of the form 'kp:<namespace>/<21 characters>'.")
        return cls(match[1], match[2])


def check_namespace(name: str) -> str:
    """Return `name` if it is a valid namespace (and folder name); raise `PromptError` otherwise."""
    if not isinstance(name, str) or not re.fullmatch(_NAMESPACE, name):
        near = re.sub(r"[^a-z0-9_-]+", "-", str(name).lower()).strip("-")[:64]
        example = f", e.g. {near!r}" if near else ""
        raise PromptError(f"Got the namespace {name!r}; expected 1 to 64 characters a-z, 0-9, '-', '_'{example}.")
    return name


def mint(secret: bytes, namespace: str, text: str) -> Handle:
    """Make the handle of `text` in `namespace` under `secret` (16 to 64 bytes)."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=secret, person=b"kp-handle-v1")
    digest.update(check_namespace(namespace).encode() + b"\0" + text.encode())
    return Handle(namespace, base64.b32encode(digest.digest()).decode().rstrip("=").lower())


def find_handles(text: str) -> list[tuple[int, int, Handle]]:
    """Return all handles in `text`, in order, as `(start, stop, handle)`; does not check whether their packs exist."""
    return [(match.start(), match.end(), Handle(match[1], match[2])) for match in _PATTERN.finditer(text)]


def handles_like(text: str) -> list[str]:
    """Return what is or was meant as a handle in `text`, in order: also one that lost or changed a few characters."""
    return [match[0] for match in _LIKE.finditer(text)]


def strip_handles(text: str, start: int = 0) -> str:
    """Return `text` from `start` on without the handles that begin there; what is before `start` is only looked at.

    A space separates remaining parts that would join to a new handle.
    """
    parts, at = list[str](), start
    for match in _PATTERN.finditer(text, start):
        parts += [text[at : match.start()], " " if text[: match.start()].endswith(_JOINTS) else ""]
        at = match.end()
    return "".join([*parts, text[at:]])


def inert(text: str) -> str:
    """Return `text` with a space in each handle, so that untrusted text in a message brings in no packs."""
    return _PATTERN.sub(lambda match: match[0].replace("kp:", "kp: ", 1), text)
