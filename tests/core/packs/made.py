"""Packs, files, stores and damage for the tests of this folder."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import torch

from kp_core.kv import KVTensors
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.file import encode_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore

FINGERPRINT = ModelFingerprint(**{field.name: field.name for field in fields(ModelFingerprint)})
UNKNOWN = ModelFingerprint.unknown()
EARLIER = "cut by rule 1 every 1024"
"""The `passes` that is read from files of versions 2 to 4, see `older`."""


def make_pack(
    text: str = "Paris.", namespace: str = "geo", *, seed: int = 0, tokens: int = 3, **changes
) -> KnowledgePack:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, tokens, 4, generator=generator).bfloat16() for _ in range(4)]
    kv = KVTensors(tuple(tensors[:2]), tuple(tensors[2:]))
    pack = KnowledgePack(text, namespace, tuple(range(tokens)), Prefix((9, 8)), FINGERPRINT, kv, {"title": text})
    return replace(pack, **changes)


def encode(pack: KnowledgePack) -> bytes:
    return b"".join(encode_pack(pack).chunks())


def canonical(content: object) -> str:
    return json.dumps(content, ensure_ascii="\\ud800" in json.dumps(content), separators=(",", ":"), sort_keys=True)


def content_of(pack: KnowledgePack) -> dict[str, Any]:
    """What the metadata of its file say."""
    content: dict[str, Any] = json.loads(json.loads(encode_pack(pack).head[8:])["__metadata__"]["pack"])
    return content


def rebuild(content: object, *, version: str = "5", data: bytes = b"", entries: dict | None = None, **other) -> bytes:
    """A file with a valid digest around any content."""
    text = content if isinstance(content, str) else canonical(content)
    digest = blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()
    metadata = {"format": "knowledge-pack", "version": version, "digest": digest, "pack": text, **other}
    header = json.dumps({"__metadata__": metadata, **(entries or {})}).encode()
    return len(header).to_bytes(8, "little") + header + data


def rounded_file(pack: KnowledgePack) -> bytes:
    """The file in which release 0.2 stored `pack` in eight bits a number; the numbers themselves are others."""
    file = encode_pack(pack.compressed("lossless"))
    content = content_of(pack.compressed("lossless"))
    content["compression"], content["fingerprint"]["dtype"] = "int8", f"{pack.fingerprint.dtype}/int8"
    entries = {name: entry for name, entry in json.loads(file.head[8:]).items() if name != "__metadata__"}
    return rebuild(content, entries=entries, data=b"".join(file.tensors))


def older(content: dict[str, Any], version: str = "2", cuts: Sequence[object] = (2, 3)) -> dict[str, Any]:
    """The metadata of a pack as files of an earlier version have them."""
    found = {name: value for name, value in content.items() if name != "states" or version == "4"}
    made = {name: value for name, value in content["fingerprint"].items() if name != "passes"}
    found["fingerprint"] = {**made, "cuts": "1", "chunk_tokens": "1024"}
    found["prefix"] = {**content["prefix"], "cuts": list(cuts)}
    return found


def earlier(pack: KnowledgePack) -> KnowledgePack:
    """What is read of `pack` from an `older_file`."""
    return replace(pack, fingerprint=replace(pack.fingerprint, passes=EARLIER))


def older_file(pack: KnowledgePack, version: str) -> bytes:
    """`pack` as an earlier release wrote it."""
    data = encode(pack)
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    content = older(json.loads(entries.pop("__metadata__")["pack"]), version)
    return rebuild(content, version=version, entries=entries, data=data[start:])


def same(one: KnowledgePack, other: KnowledgePack) -> bool:
    if (one.kv is None) != (other.kv is None) or (one.kv and other.kv and not one.kv.equal(other.kv)):
        return False
    names = [field.name for field in fields(KnowledgePack) if field.name not in {"kv", "stored_bytes"}]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def files_of(store: PackStore, handle: Handle):
    folder = store.path / "packs" / handle.namespace / handle.id[:2]
    return folder / f"{handle.id}.safetensors", folder / f"{handle.id}.txt"


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
