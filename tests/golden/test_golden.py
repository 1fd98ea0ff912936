"""Files as they were first written: these bytes, these values, for good.

`python tests/golden/test_golden.py` writes them anew, which only a new version of the format may make necessary.
"""

import json
import re
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
import zstandard

from kp_core import PackStore
from kp_core.kv import KVTensors
from kp_core.packs.entry import VERSION, Entry, encode_entry, open_entry
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, mint
from kp_core.packs.pack import KnowledgePack, Prefix
from tests.core.packs.made import same

HERE = Path(__file__).parent
FORMAT = (HERE.parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
TEXT = "The Eiffel Tower “la dame de fer”\nis 330 m tall. 🗼\n"
HANDLE = Handle("paris-1889", "a" * 21)
NAMES = ["bfloat16", "float32", "lossless", "states"]
ZSTD = (1, 5, 7)
"""What compressed those; another one may compress better."""


def golden_pack(name: str) -> KnowledgePack:
    """The pack whose entry is in `<name>.safetensors`; layers differ in kv_heads, keys and values in head_dim."""
    fingerprint = ModelFingerprint(**{field.name: f"the {field.name}" for field in fields(ModelFingerprint)})
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    shapes = [(1, 3, 4), (1, 3, 2), (2, 3, 4), (2, 3, 2)]
    tensors = [
        (torch.arange(shape[0] * shape[1] * shape[2]).view(shape) / 8 - index).to(dtype)
        for index, shape in enumerate(shapes)
    ]
    states = (torch.arange(6.0).view(3, 2).to(dtype), torch.arange(8.0).view(2, 2, 2) / 3)
    kv = KVTensors(tuple(tensors[::2]), tuple(tensors[1::2]), states if name == "states" else ())
    prefix, provenance = Prefix((1, 9690, 198, 2)), {"title": "Tour Eiffel", "source": "https://example.org/é"}
    pack = KnowledgePack(TEXT, "paris-1889", (504, 414, 12345), prefix, fingerprint, kv, provenance)
    return pack.compressed("lossless" if name == "lossless" else "none")


def entry(name: str) -> Entry:
    pack = golden_pack(name)
    return Entry.of_pack(HANDLE, pack.fingerprint, pack.prefix, pack.token_ids)


def encoded(name: str) -> bytes:
    pack = golden_pack(name)
    return b"".join(encode_entry(entry(name), pack.kv, pack.compression).chunks())


def golden(name: str) -> bytes:
    return (HERE / f"{name}.safetensors").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_reading_gives_the_known_values(name):
    found = open_entry(golden(name))
    header = json.loads(golden(name)[8 : 8 + int.from_bytes(golden(name)[:8], "little")])
    assert header["__metadata__"]["version"] == VERSION == "6"
    assert (found.entry, found.compression) == (entry(name), golden_pack(name).compression)
    assert found.read().equal(golden_pack(name).kv)


@pytest.mark.parametrize("name", NAMES)
def test_writing_gives_the_known_bytes(name):
    if name != "lossless" or zstandard.ZSTD_VERSION == ZSTD:
        assert encoded(name) == golden(name)


def test_the_bytes_have_not_changed():
    """Guards against writing the golden files anew along with a changed format."""
    files = [path for path in HERE.iterdir() if path.suffix in {".safetensors", ".txt"}]
    assert {path.name: blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in files} == {
        "bfloat16.safetensors": "90c5a9ff7c6eafaf",
        "float32.safetensors": "6729b4f628427a99",
        "lossless.safetensors": "04217516aecd4693",
        "pack.txt": "3dd555f22c506db6",
        "states.safetensors": "4c9db565c5e6a6db",
    }


def store_of(folder: Path, text: bytes) -> tuple[PackStore, Handle]:
    """A store with the secret of the specification, and one pack of this text file."""
    (folder / "secret").write_bytes(bytes(range(32)))
    handle = mint(bytes(range(32)), "paris-1889", TEXT)
    file = folder / "packs" / "paris-1889" / handle.id[:2] / f"{handle.id}.txt"
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    return PackStore(folder), handle


def test_a_text_file_is_read_and_written_as_ever(tmp_path):
    store, handle = store_of(tmp_path, (HERE / "pack.txt").read_bytes())
    pack = golden_pack("bfloat16")
    assert same(store.get(handle), pack.without_kv())
    assert store.put(pack) == handle
    assert next(tmp_path.rglob("*.txt")).read_bytes() == (HERE / "pack.txt").read_bytes()
    assert same(store.get(handle), pack)


def test_handle_derivation():
    handle = str(mint(bytes(range(32)), "paris-1889", "The Eiffel Tower"))
    assert handle == "kp:paris-1889/tmn7tkvyuryf6lsptrqky"
    assert handle in FORMAT


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_of_the_specification_reads_them(name):
    code = re.search(r"```python\n(.*?)```", FORMAT, re.DOTALL)
    scope = {}
    exec(code[1], scope)  # noqa: S102 - it is our own documentation that is tested
    about, tensors = scope["read"](HERE / f"{name}.safetensors")
    expected = golden_pack(name)
    assert (about["owners"], tuple(about["token_ids"])) == ([str(HANDLE)], expected.token_ids)
    assert about["compression"] == expected.compression
    assert len(tensors) == 4 + len(expected.kv.states)
    values = torch.frombuffer(bytearray(tensors["layers.1.value"]), dtype=expected.kv.dtype)
    assert torch.equal(values.view(2, 3, 2), expected.kv.values[1])
    if name == "states":
        found = torch.frombuffer(bytearray(tensors["states.1"]), dtype=torch.float32)
        assert torch.equal(found.view(2, 2, 2), expected.kv.states[1])


if __name__ == "__main__":
    from kp_core.packs.pack import encode_text

    for each in NAMES:
        (HERE / f"{each}.safetensors").write_bytes(encoded(each))
    (HERE / "pack.txt").write_bytes(encode_text([golden_pack("bfloat16")]))
