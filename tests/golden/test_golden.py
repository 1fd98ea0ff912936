"""Files of each version as they were first written: these bytes, these values, for good.

`python tests/golden/test_golden.py` writes those of the present version anew, which only a new version of the format
may make necessary.
"""

import re
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from kp_core.kv import KVTensors
from kp_core.packs.file import encode_pack, read_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import mint
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.steering import load_steering

HERE = Path(__file__).parent
FORMAT = (HERE.parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
TEXT = "The Eiffel Tower “la dame de fer”\nis 330 m tall. 🗼\n"


NAMES = ["bfloat16", "float32", "lazy", "bfloat16.v2", "float32.v2", "lazy.v2"]
NAMES += ["bfloat16.v3", "float32.v3", "int8.v3", "states.v4"]
SINCE_2 = ("adapters", "cuts", "engine")
"""Fields of a fingerprint that files of version 1 lack."""


def golden_pack(name: str) -> KnowledgePack:
    """The pack in `<name>.safetensors`; layers differ in kv_heads, keys and values in head_dim."""
    name, _, version = name.partition(".")
    lacking = () if version else SINCE_2
    known = {field.name: f"the {field.name}" for field in fields(ModelFingerprint)} | dict.fromkeys(lacking, "")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32, "lazy": None, "int8": torch.bfloat16}.get(
        name, torch.bfloat16
    )
    kv = None
    if dtype is not None:
        shapes = [(1, 3, 4), (1, 3, 2), (2, 3, 4), (2, 3, 2)]
        tensors = [
            (torch.arange(shape[0] * shape[1] * shape[2]).view(shape) / 8 - index).to(dtype)
            for index, shape in enumerate(shapes)
        ]
        states = (torch.arange(6.0).view(3, 2).to(dtype), torch.arange(8.0).view(2, 2, 2) / 3)
        kv = KVTensors(tuple(tensors[::2]), tuple(tensors[1::2]), states if name == "states" else ())
    pack = KnowledgePack(
        text=TEXT,
        namespace="paris-1889",
        token_ids=(504, 414, 12345),
        prefix=Prefix((1, 9690, 198, 2), (1, 4)),
        fingerprint=ModelFingerprint(**known),
        kv=kv,
        provenance={"title": "Tour Eiffel", "source": "https://example.org/é"},
    )
    return pack.compressed("int8" if name == "int8" else "lossless") if version == "v3" else pack


@pytest.mark.parametrize("name", NAMES)
def test_reading_gives_the_known_values(name):
    found = read_pack((HERE / f"{name}.safetensors").read_bytes())
    expected = golden_pack(name)
    for field in fields(KnowledgePack):
        if field.name != "kv":
            assert getattr(found, field.name) == getattr(expected, field.name)
    assert (found.kv is None) == (expected.kv is None)
    if expected.kv is not None:
        assert found.kv.equal(expected.kv)


@pytest.mark.parametrize("name", NAMES)
def test_only_files_of_version_1_are_of_no_model_of_today(name):
    assert golden_pack(name).fingerprint.is_legacy == ("." not in name)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.endswith("v3")]
)  # zstd may compress better one day
def test_writing_gives_the_known_bytes(name):
    assert b"".join(encode_pack(golden_pack(name)).chunks()) == (HERE / f"{name}.safetensors").read_bytes()


def test_the_bytes_have_not_changed():
    """Guards against writing the golden files anew along with a changed format."""
    digests = {path.stem: blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in HERE.glob("*.safetensors")}
    assert digests == {
        "bfloat16": "1d7baf87e8d85f8c",
        "float32": "bda5f6e4f600e7d1",
        "lazy": "99c28a11866ac5fd",
        "bfloat16.v2": "feed9dabdfd415ac",
        "float32.v2": "4a0d499e857d3121",
        "lazy.v2": "d0d8b242f875a581",
        "bfloat16.v3": "f18a45a88f56a7af",
        "float32.v3": "2dc4fcd1a16e1902",
        "int8.v3": "87e72246511ea7b7",
        "states.v4": "e908d0ef1283d15a",
    }


def test_a_steering_of_version_1_is_read():
    steering = load_steering(HERE / "steering.v1")
    assert steering.fingerprint.is_legacy
    assert {layer: tuple(delta.shape) for layer, delta in steering.values.items()} == {1: (2, 8)}
    assert steering.provenance["made"] == "mean of 1 pairs"


def test_handle_derivation():
    handle = str(mint(bytes(range(32)), "paris-1889", "The Eiffel Tower"))
    assert handle == "kp:paris-1889/tmn7tkvyuryf6lsptrqky"
    assert handle in FORMAT


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_of_the_specification_reads_them(name):
    code = re.search(r"```python\n(.*?)```", FORMAT, re.DOTALL)
    scope = {}
    exec(code[1], scope)  # noqa: S102 - it is our own documentation that is tested
    pack, tensors = scope["read"](HERE / f"{name}.safetensors")
    expected = golden_pack(name)
    assert (pack["text"], tuple(pack["token_ids"])) == (TEXT, expected.token_ids)
    assert pack.get("compression", "none") == expected.compression
    assert len(tensors) == (0 if expected.kv is None else 4 + len(expected.kv.states))
    if expected.kv is not None and name != "int8.v3":
        values = torch.frombuffer(bytearray(tensors["layers.1.value"]), dtype=expected.kv.dtype)
        assert torch.equal(values.view(2, 3, 2), expected.kv.values[1])
    if name == "states.v4":
        found = torch.frombuffer(bytearray(tensors["states.1"]), dtype=torch.float32)
        assert torch.equal(found.view(2, 2, 2), expected.kv.states[1])


if __name__ == "__main__":
    for each in NAMES[9:]:
        (HERE / f"{each}.safetensors").write_bytes(b"".join(encode_pack(golden_pack(each)).chunks()))
