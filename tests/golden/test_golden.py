"""Files of each version as they were first written: these bytes, these values, for good.

`python tests/golden/test_golden.py` writes those of the present version anew, which only a new version of the format
may make necessary.
"""

import json
import re
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
import zstandard

from kp_core.kv import KVTensors
from kp_core.packs.file import VERSION, encode_pack, read_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import mint
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.steering import load_steering
from tests.core.packs.made import encode, same

HERE = Path(__file__).parent
FORMAT = (HERE.parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
TEXT = "The Eiffel Tower “la dame de fer”\nis 330 m tall. 🗼\n"


OLD = ["bfloat16.v2", "float32.v2", "lazy.v2", "bfloat16.v3", "float32.v3", "states.v4"]
NEW = ["bfloat16.v5", "float32.v5", "lossless.v5", "lazy.v5", "states.v5"]
ROUNDED = ["int8.v3", "int8.v5"]
"""What release 0.2 stored in eight bits a number: text and tokens are read, KV is not."""
PACKED = {"bfloat16.v3": "lossless", "float32.v3": "lossless", "lossless.v5": "lossless"}
ZSTD = (1, 5, 7)
"""What compressed those of version 5; another one may compress better."""


def golden_pack(name: str) -> KnowledgePack:
    """The pack in `<name>.safetensors`; layers differ in kv_heads, keys and values in head_dim."""
    kind, _, version = name.partition(".")
    known = {field.name: f"the {field.name}" for field in fields(ModelFingerprint)}
    if version != "v5":
        known["passes"] = "cut by rule the cuts every the chunk_tokens"
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    shapes = [(1, 3, 4), (1, 3, 2), (2, 3, 4), (2, 3, 2)]
    tensors = [
        (torch.arange(shape[0] * shape[1] * shape[2]).view(shape) / 8 - index).to(dtype)
        for index, shape in enumerate(shapes)
    ]
    states = (torch.arange(6.0).view(3, 2).to(dtype), torch.arange(8.0).view(2, 2, 2) / 3)
    kv = KVTensors(tuple(tensors[::2]), tuple(tensors[1::2]), states if kind == "states" else ())
    pack = KnowledgePack(
        text=TEXT,
        namespace="paris-1889",
        token_ids=(504, 414, 12345),
        prefix=Prefix((1, 9690, 198, 2)),
        fingerprint=ModelFingerprint(**known),
        kv=None if kind == "lazy" else kv,
        provenance={"title": "Tour Eiffel", "source": "https://example.org/é"},
    )
    if kind == "int8":
        return replace(pack.without_kv(), fingerprint=replace(pack.fingerprint, dtype=f"{known['dtype']}/int8"))
    return pack.compressed(PACKED.get(name, "none"))


def metadata_of(data: bytes) -> dict:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["__metadata__"]


def golden(name: str) -> bytes:
    return (HERE / f"{name}.safetensors").read_bytes()


@pytest.mark.parametrize("name", OLD + NEW + ROUNDED)
def test_reading_gives_the_known_values(name):
    found, expected = read_pack(golden(name)), golden_pack(name)
    assert metadata_of(golden(name))["version"] == name[-1]
    assert same(found, expected)
    assert found.fingerprint.is_earlier == (name not in NEW)


@pytest.mark.parametrize("name", NEW)
def test_writing_gives_the_known_bytes(name):
    """Also of what was read from them. Compressed bytes are those of one zstd; the numbers are always the same."""
    expected = golden(name)
    for pack in (golden_pack(name), read_pack(expected)):
        data = encode(pack)
        if name not in PACKED or zstandard.ZSTD_VERSION == ZSTD:
            assert data == expected
        assert same(read_pack(data), pack)
        found, known = (json.loads(metadata_of(each)["pack"]) for each in (data, expected))
        for about in (*found["tensors"].values(), *known["tensors"].values()):
            about.pop("stored", None)
        assert found == known


@pytest.mark.parametrize("name", OLD + ROUNDED)
def test_what_is_read_of_an_earlier_version_is_written_as_the_present_one(name):
    pack = read_pack(golden(name))
    data = encode(pack)
    assert metadata_of(data)["version"] == VERSION == "5"
    assert same(read_pack(data), pack)
    assert encode(read_pack(data)) == data
    # In the same numerics it is the same file.
    of_today = replace(pack, fingerprint=replace(pack.fingerprint, passes="the passes"))
    if name in ("bfloat16.v2", "float32.v2", "lazy.v2", "states.v4"):
        assert encode(of_today) == golden(name[:-1] + "5")


@pytest.mark.parametrize("name", OLD)
def test_cuts_of_an_earlier_version_are_read_over(name):
    assert json.loads(metadata_of(golden(name))["pack"])["prefix"]["cuts"] == [1, 4]
    assert read_pack(golden(name)).prefix == Prefix((1, 9690, 198, 2))


def test_the_bytes_have_not_changed():
    """Guards against writing the golden files anew along with a changed format."""
    files = [path for path in HERE.iterdir() if path.suffix in {".safetensors", ".v2"}]
    assert {path.name: blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in files} == {
        "bfloat16.v2.safetensors": "feed9dabdfd415ac",
        "float32.v2.safetensors": "4a0d499e857d3121",
        "lazy.v2.safetensors": "d0d8b242f875a581",
        "bfloat16.v3.safetensors": "f18a45a88f56a7af",
        "float32.v3.safetensors": "2dc4fcd1a16e1902",
        "int8.v3.safetensors": "87e72246511ea7b7",
        "states.v4.safetensors": "e908d0ef1283d15a",
        "bfloat16.v5.safetensors": "a3ab801574aa8e51",
        "float32.v5.safetensors": "24e2c523aa57fd15",
        "lossless.v5.safetensors": "db6f09c13dbac45b",
        "int8.v5.safetensors": "6bd1721af2ca2ac4",
        "lazy.v5.safetensors": "99aff1d678f23714",
        "states.v5.safetensors": "ac9ceae5462a582c",
        "steering.v2": "476bc84e988c3943",
    }


def test_a_steering_of_an_earlier_release_is_read():
    steering = load_steering(HERE / "steering.v2")
    assert steering.fingerprint == golden_pack("lazy.v2").fingerprint
    assert {layer: tuple(delta.shape) for layer, delta in steering.values.items()} == {1: (2, 8)}
    assert steering.provenance["made"] == "mean of 1 pairs"
    assert (steering.coherent, steering.recommended) == ((-2.0, float("inf")), (0.5, 1.25))


def test_handle_derivation():
    handle = str(mint(bytes(range(32)), "paris-1889", "The Eiffel Tower"))
    assert handle == "kp:paris-1889/tmn7tkvyuryf6lsptrqky"
    assert handle in FORMAT


@pytest.mark.parametrize("name", OLD + NEW + ROUNDED)
def test_the_reader_of_the_specification_reads_them(name):
    code = re.search(r"```python\n(.*?)```", FORMAT, re.DOTALL)
    scope = {}
    exec(code[1], scope)  # noqa: S102 - it is our own documentation that is tested
    pack, tensors = scope["read"](HERE / f"{name}.safetensors")
    expected = golden_pack(name)
    assert (pack["text"], tuple(pack["token_ids"])) == (TEXT, expected.token_ids)
    assert pack.get("compression", "none") == ("int8" if name in ROUNDED else expected.compression)
    layers = 4 if name in ROUNDED else 0
    assert len(tensors) == (layers if expected.kv is None else 4 + len(expected.kv.states))
    if expected.kv is not None:
        values = torch.frombuffer(bytearray(tensors["layers.1.value"]), dtype=expected.kv.dtype)
        assert torch.equal(values.view(2, 3, 2), expected.kv.values[1])
    if name.startswith("states"):
        found = torch.frombuffer(bytearray(tensors["states.1"]), dtype=torch.float32)
        assert torch.equal(found.view(2, 2, 2), expected.kv.states[1])


if __name__ == "__main__":
    for each in NEW:
        (HERE / f"{each}.safetensors").write_bytes(b"".join(encode_pack(golden_pack(each)).chunks()))
