"""Packs, stores and damage for the tests of this folder."""

from dataclasses import fields, replace

import torch

from kp_core.kv import KVTensors
from kp_core.packs.blobs import FolderBlobs
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
    pack = KnowledgePack(text, namespace, tuple(range(tokens)), Prefix((9, 8), (2,)), FINGERPRINT, kv, {"title": text})
    return replace(pack, **changes)


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

    def stat(self, key):
        self._note("stat")
        return super().stat(key)

    def list(self, prefix=""):
        self._note("list")
        return super().list(prefix)

    def delete(self, key):
        self._note("delete")
        return super().delete(key)
