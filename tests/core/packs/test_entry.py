"""Bytes of the file of an entry: round trips, agreement with the safetensors library, and what a reader rejects."""

import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from kp_core.errors import PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.entry import encode_entry, open_entry, read_header
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack, Prefix
from tests.core.packs.made import content_of, encode, entry_of, file_of, rebuild

FINGERPRINT = ModelFingerprint(**{field.name: f"{field.name}-é" for field in fields(ModelFingerprint)})


def make_kv(tokens: int, dtype: torch.dtype = torch.bfloat16, layers: int = 2, seed: int = 0) -> KVTensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1 + layer, tokens, 4 + 2 * (half == 1)) for layer in range(layers) for half in range(2)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return KVTensors(tuple(tensors[::2]), tuple(tensors[1::2]))


def make_pack(tokens: int = 5, *, dtype: torch.dtype = torch.bfloat16) -> KnowledgePack:
    ids = tuple(range(7, 7 + tokens))
    return KnowledgePack("A text.", "geo", ids, Prefix((1, 2, 3)), FINGERPRINT, make_kv(tokens, dtype))


def same(data: bytes, pack: KnowledgePack) -> bool:
    """Whether a file is that of the entry of `pack`, to the last bit."""
    file = open_entry(data)
    return (file.entry, file.compression) == (entry_of(pack), pack.compression) and file.read().equal(pack.kv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_round_trip(dtype, tokens):
    pack = make_pack(tokens, dtype=dtype)
    data = encode(pack)
    assert len(data) == file_of(pack).nbytes
    assert same(data, pack)
    assert read_header(data).entry == entry_of(pack)
    assert read_header(data[:4000], len(data)).head == file_of(pack).head
    assert b"".join(encode_entry(open_entry(data).entry, open_entry(data).read()).chunks()) == data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 5, 700])
def test_compressed_round_trip(dtype, tokens):
    """What is decoded is what was given, bit for bit."""
    plain = make_pack(tokens, dtype=dtype)
    pack = plain.compressed("lossless")
    assert pack.kv is plain.kv
    data = encode(pack)
    assert content_of(pack)["compression"] == "lossless"
    assert same(data, pack)
    assert read_header(data).entry == entry_of(pack)
    if tokens == 700:
        assert len(data) < len(encode(plain))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_finite_numbers_survive_compression(data):
    """Zeros of both signs, subnormal numbers, the largest ones: what `compressed` gave is read back."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    width = {torch.bfloat16: 16, torch.float32: 32}[dtype]
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
    numbers = torch.tensor(data.draw(st.lists(floats, min_size=24, max_size=24)), dtype=torch.float32).to(dtype)
    assert numbers.element_size() * 8 == width
    kv = KVTensors((numbers.view(2, 3, 4),), (numbers.flip(0).view(2, 3, 4),))
    pack = replace(make_pack(3), kv=kv).compressed("lossless")
    found = open_entry(encode(pack)).read()
    for one, other in zip((*found.keys, *found.values), (*pack.kv.keys, *pack.kv.values), strict=True):
        assert torch.equal(one.view(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_other_compressions_are_refused_and_eight_bits_with_what_to_use():
    for write in (
        lambda: file_of(replace(make_pack(), compression="int8")),
        lambda: make_pack().compressed("int8"),
    ):
        with pytest.raises(PackError, match=r"expected one of none, lossless\. It is gone in 0\.3; 'lossless' stores"):
            write()
    with pytest.raises(PackError, match="zip"):
        make_pack().compressed("zip")


def with_states(pack: KnowledgePack) -> KnowledgePack:
    states = (torch.randn(3, 4).to(pack.kv.dtype), torch.randn(2, 3, 2), torch.tensor(1.5))
    return replace(pack, kv=replace(pack.kv, states=states))


@pytest.mark.parametrize("compression", ["none", "lossless"])
@pytest.mark.parametrize("tokens", [0, 5, 700])
def test_states_of_recurrent_layers_round_trip(tmp_path, tokens, compression):
    pack = with_states(make_pack(tokens)).compressed(compression)
    data = encode(pack)
    assert same(data, pack)
    assert [state.dtype for state in open_entry(data).read().states] == [torch.bfloat16, torch.float32, torch.float32]
    (tmp_path / "pack.safetensors").write_bytes(data)
    assert {"states.0", "states.1", "states.2"} < load_file(tmp_path / "pack.safetensors").keys()


def test_a_model_without_keys_has_states_alone():
    empty = torch.zeros(0, 5, 0)
    pack = with_states(replace(make_pack(), kv=KVTensors((empty,), (empty,))))
    assert pack.nbytes == pack.kv.state_bytes > 0
    for compression in ("none", "lossless"):
        assert same(encode(pack.compressed(compression)), pack.compressed(compression))


def test_large_packs_are_hashed_in_threads():
    pack = replace(make_pack(300), kv=make_kv(300, torch.float64, layers=40))
    assert pack.nbytes > 4_000_000
    data = encode(pack)
    assert same(data, pack)
    with pytest.raises(PackCorruptError, match=r"layers\.39\.value"):
        open_entry(data[:-1] + bytes([data[-1] ^ 1])).read()


def test_views_are_stored_compactly():
    pack = make_pack(4)
    part = replace(pack, token_ids=pack.token_ids[1:3], kv=pack.kv.slice(1, 3))
    assert same(encode(part), part)
    assert len(encode(part)) < len(encode(pack))


def test_the_safetensors_library_reads_the_same(tmp_path):
    pack, path = make_pack(), tmp_path / "entry.safetensors"
    path.write_bytes(encode(pack))
    tensors = load_file(path)
    sides = (("key", pack.kv.keys), ("value", pack.kv.values))
    expected = {f"layers.{layer}.{name}": tensor for name, side in sides for layer, tensor in enumerate(side)}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    assert metadata.keys() == {"format", "version", "digest", "entry"}
    assert json.loads(metadata["entry"])["token_ids"] == [*pack.token_ids]


def test_layout():
    data = encode(make_pack())
    header = read_header(data)
    assert len(header.head) % 64 == 0
    assert header.nbytes == len(data)
    assert int.from_bytes(data[:8], "little") == len(header.head) - 8
    entries = json.loads(data[8 : len(header.head)])
    offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
    assert offsets[0][0] == 0
    assert all(one[1] == two[0] for one, two in pairwise(offsets))


def test_metadata_follow_the_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[3] / "docs" / "entry.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for pack in (make_pack(), make_pack(0), *PACKS):
        content = content_of(pack)
        jsonschema.validate(content, schema)
        for name in content:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({key: value for key, value in content.items() if key != name}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**content, "token_ids": [-1]}, schema)


INTEGERS = torch.zeros(1, 5, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (1.0, 2, 3, 4, 5)},
        {"token_ids": (True, 2, 3, 4, 5)},
        {"token_ids": (-1, 2, 3, 4, 5)},
        {"at": 2**53},
        {"label": "\ud800"},
        {"owners": frozenset({"kp:geo/short"})},
        {"owners": frozenset({"../up"})},
        {"model": replace(FINGERPRINT, rope="\ud800")},
        {"kv": KVTensors((INTEGERS,), (INTEGERS,))},
    ],
)
def test_what_the_format_cannot_hold_is_refused_on_writing(change):
    kv = change.pop("kv", make_pack().kv)
    with pytest.raises(PackError, match="cannot be stored"):
        encode_entry(replace(entry_of(make_pack()), **change), kv)


@pytest.mark.parametrize("version", ["5", "7"])
def test_another_version_is_named(version):
    with pytest.raises(PackError, match=f"version '{version}' of the format"):
        read_header(rebuild({"anything": 1}, version=version))


CONTENT = content_of(make_pack())
OF_KEY = CONTENT["tensors"]["layers.0.key"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        "9" * 5_000,
        '{"label": "a", "label": "b"}',
        {},
        {**CONTENT, "extra": 1},
        {**CONTENT, "label": 3},
        {**CONTENT, "label": "\ud800"},
        {**CONTENT, "owners": ["../up"]},
        {**CONTENT, "owners": [1]},
        {**CONTENT, "owners": CONTENT["owners"] * 2},
        {**CONTENT, "owners": ["kp:geo/short"]},
        {**CONTENT, "token_ids": [1, 2, 3, 4, True]},
        {**CONTENT, "token_ids": [1, 2, 3, 4, 5.0]},
        {**CONTENT, "token_ids": {"0": 1}},
        {**CONTENT, "at": -1},
        {**CONTENT, "at": None},
        {**CONTENT, "begins": "0"},
        {**CONTENT, "states": 1},
        {**CONTENT, "states": False},
        {**CONTENT, "states": None},
        {name: value for name, value in CONTENT.items() if name != "states"},
        {**CONTENT, "fingerprint": {name: "a" for name in CONTENT["fingerprint"] if name != "engine"}},
        {**CONTENT, "fingerprint": {**CONTENT["fingerprint"], "cuts": "1"}},
        {**CONTENT, "fingerprint": {**CONTENT["fingerprint"], "engine": 1}},
        {**CONTENT, "mac": None},
        {**CONTENT, "dtype": "storage"},
        {**CONTENT, "dtype": None},
        {**CONTENT, "dtype": ["bfloat16"]},
        {**CONTENT, "layers": 1},
        {**CONTENT, "compression": "lossless"},
        {**CONTENT, "compression": "int8"},
        {**CONTENT, "tensors": {}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.9.key": {}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": "", "shape": [1, 4, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": "", "shape": [9, 5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": "", "shape": [5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": 3, "shape": [1, 5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"shape": [1, 5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {**OF_KEY, "dtype": "bfloat16"}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {**OF_KEY, "stored": 40}}},
    ],
)
def test_malformed_content_is_corrupt_even_with_a_valid_digest(content):
    with pytest.raises(PackCorruptError):
        read_header(rebuild(content))


STATES = content_of(with_states(make_pack()))
OF_STATE = STATES["tensors"]["states.0"]


@pytest.mark.parametrize(
    "content",
    [
        {**STATES, "states": 0},
        {**STATES, "states": 2},
        {**STATES, "states": True},
        {**STATES, "states": 10**18},
        {**STATES, "states": -1},
        {**STATES, "states": 7},
        {**STATES, "compression": "lossless"},
        {**STATES, "tensors": {**STATES["tensors"], "states.0": {**OF_STATE, "dtype": "int8"}}},
        {**STATES, "tensors": {**STATES["tensors"], "states.0": {**OF_STATE, "dtype": None}}},
        {**STATES, "tensors": {**STATES["tensors"], "states.0": {**OF_STATE, "shape": [-1, 4]}}},
        {**STATES, "tensors": {name: each for name, each in STATES["tensors"].items() if name != "states.1"}},
    ],
)
def test_malformed_states_are_corrupt(content):
    with pytest.raises(PackCorruptError):
        read_header(rebuild(content))


def test_only_the_canonical_form_is_read():
    for other in (json.dumps(CONTENT), json.dumps(dict(reversed(CONTENT.items())), separators=(",", ":"))):
        with pytest.raises(PackCorruptError, match="canonical"):
            read_header(rebuild(other))


@pytest.mark.parametrize("other", [{"format": "pt"}, {"digest": "0" * 32}, {"more": "1"}, {"version": 1}])
def test_malformed_metadata_are_corrupt(other):
    with pytest.raises(PackCorruptError):
        read_header(rebuild(CONTENT, **other))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (18).to_bytes(8, "little") + b'{"__metadata__":3}',
    ],
)
def test_malformed_heads_are_corrupt(data):
    with pytest.raises(PackCorruptError):
        read_header(data)


def test_a_huge_compressed_shape_allocates_nothing():
    content = content_of(PACKS[1])
    entries = {f"layers.{i // 2}.{'value' if i % 2 else 'key'}": 0 for i in range(4)}
    for name in entries:
        content["tensors"][name] = {"digest": "0" * 32, "shape": [2**40, 5, 2**40], "stored": 64}
        entries[name] = {"dtype": "U8", "shape": [64], "data_offsets": [64 * list(entries).index(name)] * 2}
        entries[name]["data_offsets"][1] += 64
    with pytest.raises(PackCorruptError):
        open_entry(rebuild(content, entries=entries, data=bytes(256))).read()


def test_a_huge_shape_allocates_nothing():
    tensors = {name: {"digest": "", "shape": [2**40, 5, 2**40]} for name in CONTENT["tensors"]}
    with pytest.raises(PackCorruptError):
        read_header(rebuild({**CONTENT, "tensors": tensors}))


PACKS = [make_pack(), make_pack().compressed("lossless"), make_pack(0)]
PACKS += [with_states(make_pack()), with_states(make_pack()).compressed("lossless")]
DATA = list(map(encode, PACKS))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.sampled_from(range(len(PACKS))), data=st.data())
def test_no_damage_goes_unnoticed(which, data):
    """Any flipped byte, cut, or inserted run: an error that is ours, or the very same pack."""
    intact = DATA[which]
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "garbage"]))
    # Half of the positions are drawn from the head, which would else be missed where tensors are large.
    at = data.draw(st.integers(0, 15) | st.integers(0, len(intact) - 1))
    if kind == "flip":
        broken = intact[:at] + bytes([intact[at] ^ data.draw(st.integers(1, 255))]) + intact[at + 1 :]
    elif kind == "cut":
        broken = intact[:at]
    elif kind == "insert":
        broken = intact[:at] + data.draw(st.binary(min_size=1, max_size=9)) + intact[at:]
    else:
        broken = intact[:8] + data.draw(st.binary(max_size=40)) + intact[at:]
    try:
        found = same(broken, PACKS[which])
    except PackCorruptError:
        return
    except PackError as error:
        if "Upgrade" not in str(error):
            raise
        return
    assert found


@pytest.mark.parametrize("which", [0, 1, 3])
def test_every_single_bit_of_a_small_file(which):
    """All positions, one bit each: the head's checks alone decide, as tensors are covered by digests."""
    intact, expected = DATA[which], PACKS[which]
    unnoticed = 0
    for at in range(len(intact)):
        broken = intact[:at] + bytes([intact[at] ^ (1 << at % 8)]) + intact[at + 1 :]
        try:
            found = same(broken, expected)
        except PackCorruptError:
            continue
        unnoticed += 1
        assert found
    assert unnoticed <= 64  # Padding alone may change unnoticed.
