"""Packs, files, stores and damage for the tests of this folder."""

import json
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from kp_core.kv import KVTensors
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.entry import Entry, EntryFile, encode_entry
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore

FINGERPRINT = ModelFingerprint(**{field.name: field.name for field in fields(ModelFingerprint)})
UNKNOWN = ModelFingerprint.unknown()


def make_pack(
    text: str = "Paris.", namespace: str = "geo", *, seed: int = 0, tokens: int = 3, **changes
) -> KnowledgePack:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, tokens, 4, generator=generator).bfloat16() for _ in range(4)]
    kv = KVTensors(tuple(tensors[:2]), tuple(tensors[2:]))
    pack = KnowledgePack(text, namespace, tuple(range(tokens)), Prefix((9, 8)), FINGERPRINT, kv, {"title": text})
    return replace(pack, **changes)


def entry_of(pack: KnowledgePack, handle: Handle | None = None) -> Entry:
    handle = handle or Handle(pack.namespace, "a" * 21)
    return Entry.of_pack(handle, pack.fingerprint, pack.prefix, pack.token_ids)


def file_of(pack: KnowledgePack) -> EntryFile:
    return encode_entry(entry_of(pack), pack.kv, pack.compression)


def encode(pack: KnowledgePack) -> bytes:
    return b"".join(file_of(pack).chunks())


def canonical(content: object) -> str:
    return json.dumps(content, ensure_ascii="\\ud800" in json.dumps(content), separators=(",", ":"), sort_keys=True)


def content_of(pack: KnowledgePack) -> dict[str, Any]:
    """What the metadata of the file of its entry say."""
    content: dict[str, Any] = json.loads(json.loads(file_of(pack).head[8:])["__metadata__"]["entry"])
    return content


def rebuild(content: object, *, version: str = "6", data: bytes = b"", entries: dict | None = None, **other) -> bytes:
    """A file with a valid digest around any content."""
    text = content if isinstance(content, str) else canonical(content)
    digest = blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()
    metadata = {"format": "knowledge-pack-entry", "version": version, "digest": digest, "entry": text, **other}
    header = json.dumps({"__metadata__": metadata, **(entries or {})}).encode()
    return len(header).to_bytes(8, "little") + header + data


def same(one: KnowledgePack, other: KnowledgePack) -> bool:
    if (one.kv is None) != (other.kv is None) or (one.kv and other.kv and not one.kv.equal(other.kv)):
        return False
    names = [field.name for field in fields(KnowledgePack) if field.name not in {"kv", "stored_bytes"}]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def files_of(store: PackStore, handle: Handle) -> tuple[Path, Path]:
    """The file of the entry of what `make_pack` makes, and that of its text."""
    folder = store.path / "packs" / handle.namespace / handle.id[:2]
    return store.path / entry_of(make_pack(), handle).key, folder / f"{handle.id}.txt"


def snapshot(store: PackStore) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in store.path.rglob("*") if path.is_file() and path.name != "lock"}


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Watched(FolderBlobs):
    """Writes down what is done, and calls `before` with the number of each operation first."""

    def __init__(self, path, before=lambda _number: None) -> None:
        super().__init__(path)
        self.done, self.before = [], before

    def _note(self, name: str) -> None:
        self.done.append(name)
        self.before(len(self.done) - 1)

    def read(self, *args):
        self._note("read")
        return super().read(*args)

    def write(self, *args, **options):
        self._note("write")
        return super().write(*args, **options)

    def stat(self, key, *, recent=False):
        self._note("stat")
        return super().stat(key)

    def list(self, prefix=""):
        self._note("list")
        return super().list(prefix)

    def delete(self, key):
        self._note("delete")
        return super().delete(key)
