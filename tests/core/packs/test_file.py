"""Bytes of one pack file: round trips, agreement with the safetensors library, and what a reader rejects."""

import json
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from kp_core.errors import PackCorruptError, PackError, PackVersionError
from kp_core.kv import KVTensors
from kp_core.packs.file import encode_pack, read_header, read_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack, Prefix

TEXT = "Paris “lies” on the\nSeine \u2028\x00\x7f <|im_end|> 🗼"
FINGERPRINT = ModelFingerprint(**{field.name: f"{field.name}-é" for field in fields(ModelFingerprint)})


def make_kv(tokens: int, dtype: torch.dtype = torch.bfloat16, layers: int = 2, seed: int = 0) -> KVTensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1 + layer, tokens, 4 + 2 * (half == 1)) for layer in range(layers) for half in range(2)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return KVTensors(tuple(tensors[::2]), tuple(tensors[1::2]))


def make_pack(tokens: int = 5, *, kv: bool = True, dtype: torch.dtype = torch.bfloat16) -> KnowledgePack:
    return KnowledgePack(
        text=TEXT,
        namespace="geo",
        token_ids=tuple(range(7, 7 + tokens)),
        prefix=Prefix((1, 2, 3), (2, 3)),
        fingerprint=FINGERPRINT,
        kv=make_kv(tokens, dtype) if kv else None,
        provenance={"title": "Städte", "source": "a\nb"},
    )


def same(one: KnowledgePack, other: KnowledgePack) -> bool:
    if (one.kv is None) != (other.kv is None) or (one.kv and other.kv and not one.kv.equal(other.kv)):
        return False
    names = [field.name for field in fields(KnowledgePack) if field.name != "kv"]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def encode(pack: KnowledgePack) -> bytes:
    return b"".join(encode_pack(pack).chunks())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_round_trip(dtype, tokens):
    pack = make_pack(tokens, dtype=dtype)
    data = encode(pack)
    assert len(data) == encode_pack(pack).nbytes
    assert same(read_pack(data), pack)
    assert same(read_header(data).pack, pack.without_kv())
    assert encode(read_pack(data)) == data


@pytest.mark.parametrize("compression", ["lossless", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 5, 700])
def test_compressed_round_trip(dtype, tokens, compression):
    """What is decoded is what was given, bit for bit: int8 rounds before, and says so in the fingerprint."""
    plain = make_pack(tokens, dtype=dtype)
    pack = plain.compressed(compression)
    assert (pack.fingerprint == plain.fingerprint) == (compression == "lossless")
    assert pack.kv.equal(plain.kv) == (compression == "lossless" or not tokens)
    data = encode(pack)
    assert json.loads(encode_pack(pack).metadata)["compression"] == compression
    assert same(read_pack(data), pack)
    assert same(read_header(data).pack, pack.without_kv())
    assert encode(read_pack(data)) == data
    assert same(pack.compressed(compression), pack), "rounding twice changes nothing"
    if tokens == 700:
        assert len(data) < len(encode(plain))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), compression=st.sampled_from(["lossless", "int8"]))
def test_any_finite_numbers_survive_compression(data, compression):
    """Zeros of both signs, subnormal numbers, the largest ones: what `compressed` gave is read back."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    width = {torch.bfloat16: 16, torch.float32: 32}[dtype]
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
    numbers = torch.tensor(data.draw(st.lists(floats, min_size=24, max_size=24)), dtype=torch.float32).to(dtype)
    assert numbers.element_size() * 8 == width
    kv = KVTensors((numbers.view(2, 3, 4),), (numbers.flip(0).view(2, 3, 4),))
    pack = replace(make_pack(3), kv=kv).compressed(compression)
    found = read_pack(encode(pack)).kv
    for one, other in zip((*found.keys, *found.values), (*pack.kv.keys, *pack.kv.values), strict=True):
        assert torch.equal(one.view(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if compression == "int8":
        step = numbers.float().abs().max() / 64
        assert all((a.float() - b.float()).abs().max() <= step for a, b in zip(kv.keys, found.keys, strict=True))


def test_int8_takes_only_what_was_rounded_and_finite():
    with pytest.raises(PackError, match=r"compressed\('int8'\)"):
        encode_pack(replace(make_pack(), compression="int8"))
    kv = make_kv(5)
    kv.keys[0][0, 0, 0] = float("inf")
    with pytest.raises(PackError, match="not finite"):
        replace(make_pack(), kv=kv).compressed("int8")
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
    found = read_pack(data)
    assert same(found, pack)
    assert [state.dtype for state in found.kv.states] == [torch.bfloat16, torch.float32, torch.float32]
    assert encode(found) == data
    assert same(read_header(data).pack, pack.without_kv())
    (tmp_path / "pack.safetensors").write_bytes(data)
    assert {"states.0", "states.1", "states.2"} < load_file(tmp_path / "pack.safetensors").keys()


def test_a_model_without_keys_has_states_alone():
    empty = torch.zeros(0, 5, 0)
    pack = with_states(replace(make_pack(), kv=KVTensors((empty,), (empty,))))
    assert pack.nbytes == pack.kv.state_bytes > 0
    for compression in ("none", "lossless"):
        assert same(read_pack(encode(pack.compressed(compression))), pack.compressed(compression))


def test_states_are_not_rounded():
    with pytest.raises(PackError, match="carried on"):
        with_states(make_pack()).compressed("int8")


def test_lazy_round_trip():
    pack = make_pack(kv=False)
    assert same(read_pack(encode(pack)), pack)


def test_large_packs_are_hashed_in_threads():
    pack = replace(make_pack(300), kv=make_kv(300, torch.float64, layers=40))
    assert pack.nbytes > 4_000_000
    data = encode(pack)
    assert same(read_pack(data), pack)
    with pytest.raises(PackCorruptError, match=r"layers\.39\.value"):
        read_pack(data[:-1] + bytes([data[-1] ^ 1]))


def test_views_are_stored_compactly():
    pack = make_pack(4)
    part = replace(pack, token_ids=pack.token_ids[1:3], kv=pack.kv.slice(1, 3))
    assert same(read_pack(encode(part)), part)
    assert len(encode(part)) < len(encode(pack))


@pytest.mark.parametrize("kv", [True, False])
def test_the_safetensors_library_reads_the_same(tmp_path, kv):
    pack, path = make_pack(kv=kv), tmp_path / "pack.safetensors"
    path.write_bytes(encode(pack))
    tensors = load_file(path)
    expected = (
        {
            f"layers.{layer}.{name}": tensor
            for name, side in (("key", pack.kv.keys), ("value", pack.kv.values))
            for layer, tensor in enumerate(side)
        }
        if kv
        else {}
    )
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    assert metadata.keys() == {"format", "version", "digest", "pack"}
    assert json.loads(metadata["pack"])["text"] == TEXT


def test_layout():
    data = encode(make_pack())
    header = read_header(data)
    assert header.start % 64 == 0
    assert header.nbytes == len(data)
    assert int.from_bytes(data[:8], "little") == header.start - 8
    entries = json.loads(data[8 : header.start])
    offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
    assert offsets[0][0] == 0
    assert all(one[1] == two[0] for one, two in pairwise(offsets))


def test_metadata_follow_the_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[3] / "docs" / "pack.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for pack in (make_pack(), make_pack(kv=False), make_pack(0), *PACKS):
        content = json.loads(encode_pack(pack).metadata)
        jsonschema.validate(content, schema)
        for name in content.keys() - {"compression", "states"}:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({key: value for key, value in content.items() if key != name}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**content, "token_ids": [-1]}, schema)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "\ud800"},
        {"provenance": {"title": 3}},
        {"provenance": {"title": "\udfff"}},
        {"token_ids": (1.0, 2, 3, 4, 5)},
        {"token_ids": (True, 2, 3, 4, 5)},
        {"token_ids": (-1, 2, 3, 4, 5)},
        {"prefix": Prefix((2**53,), (1,))},
        {"fingerprint": replace(FINGERPRINT, rope="\ud800")},
        {"kv": KVTensors((torch.zeros(1, 5, 2, dtype=torch.int8),), (torch.zeros(1, 5, 2, dtype=torch.int8),))},
    ],
)
def test_what_the_format_cannot_hold_is_refused_on_writing(change):
    with pytest.raises(PackError, match="cannot be stored"):
        encode_pack(replace(make_pack(), **change))


def canonical(content: object) -> str:
    return json.dumps(content, ensure_ascii="\\ud800" in json.dumps(content), separators=(",", ":"), sort_keys=True)


def rebuild(content: object, *, version: str = "2", data: bytes = b"", entries: dict | None = None, **other) -> bytes:
    """A file with a valid digest around any content."""
    text = content if isinstance(content, str) else canonical(content)
    digest = blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()
    metadata = {"format": "knowledge-pack", "version": version, "digest": digest, "pack": text, **other}
    header = json.dumps({"__metadata__": metadata, **(entries or {})}).encode()
    return len(header).to_bytes(8, "little") + header + data


def test_a_later_version_is_named():
    with pytest.raises(PackVersionError, match="'5'"):
        read_header(rebuild({"anything": 1}, version="5"))


CONTENT = json.loads(encode_pack(make_pack()).metadata)
LAZY = json.loads(encode_pack(make_pack(kv=False)).metadata)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        "9" * 5_000,
        '{"text": "a", "text": "b"}',
        {},
        {**LAZY, "extra": 1},
        {**LAZY, "text": 3},
        {**LAZY, "text": "\ud800"},
        {**LAZY, "namespace": "../up"},
        {**LAZY, "token_ids": [1, 2, 3, 4, True]},
        {**LAZY, "token_ids": [1, 2, 3, 4, 5.0]},
        {**LAZY, "token_ids": {"0": 1}},
        {**LAZY, "tokens": 4},
        {**LAZY, "layers": 1},
        {**LAZY, "dtype": "bfloat16"},
        {**LAZY, "prefix": {"token_ids": []}},
        {**LAZY, "head": LAZY["prefix"]},
        {**LAZY, "fingerprint": {name: "a" for name in LAZY["fingerprint"] if name != "engine"}},
        {**LAZY, "fingerprint": {**LAZY["fingerprint"], "engine": 1}},
        {**LAZY, "provenance": {"title": None}},
        {**LAZY, "fingerprint": {"weights": "a"}},
        {**CONTENT, "dtype": "storage"},
        {**CONTENT, "dtype": None},
        {**CONTENT, "dtype": ["bfloat16"]},
        {**CONTENT, "layers": 1},
        {**CONTENT, "tensors": {}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.9.key": {}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": "", "shape": [1, 4, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": "", "shape": [9, 5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": "", "shape": [5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"digest": 3, "shape": [1, 5, 4]}}},
        {**CONTENT, "tensors": {**CONTENT["tensors"], "layers.0.key": {"shape": [1, 5, 4]}}},
    ],
)
def test_malformed_content_is_corrupt_even_with_a_valid_digest(content):
    with pytest.raises(PackCorruptError):
        read_header(rebuild(content))


STATES = json.loads(encode_pack(with_states(make_pack())).metadata)
OF_STATE = STATES["tensors"]["states.0"]


@pytest.mark.parametrize(
    "content",
    [
        CONTENT,
        LAZY,
        {**STATES, "states": 0},
        {**STATES, "states": 2},
        {**STATES, "states": True},
        {**STATES, "states": 10**18},
        {**STATES, "states": -1},
        {**STATES, "states": 7},
        {**STATES, "compression": "none"},
        {**STATES, "compression": "lossless"},
        {**STATES, "tensors": {**STATES["tensors"], "states.0": {**OF_STATE, "dtype": "int8"}}},
        {**STATES, "tensors": {**STATES["tensors"], "states.0": {**OF_STATE, "dtype": None}}},
        {**STATES, "tensors": {**STATES["tensors"], "states.0": {**OF_STATE, "shape": [-1, 4]}}},
        {**STATES, "tensors": {name: each for name, each in STATES["tensors"].items() if name != "states.1"}},
    ],
)
def test_malformed_states_are_corrupt(content):
    with pytest.raises(PackCorruptError):
        read_header(rebuild(content, version="4"))
    with pytest.raises(PackCorruptError):
        read_header(rebuild(STATES, version="2"))


@pytest.mark.parametrize("content", [CONTENT, LAZY])
def test_only_the_canonical_form_is_read(content):
    assert same(read_header(rebuild(content)).pack, make_pack(kv=False))
    for other in (json.dumps(content), json.dumps(dict(reversed(content.items())), separators=(",", ":"))):
        with pytest.raises(PackCorruptError, match="canonical"):
            read_header(rebuild(other))


def test_what_an_earlier_release_computed_is_written_as_it_was():
    """Its fingerprint lacks fields, so it keeps to the version of its file."""
    old = replace(FINGERPRINT, adapters="", cuts="", engine="")
    assert old.is_legacy
    pack = replace(make_pack(), fingerprint=old)
    assert json.loads(encode_pack(pack).metadata)["fingerprint"].keys() == old.to_dict("1").keys()
    assert same(read_pack(encode(pack)), pack)
    unknown = dict.fromkeys(old.to_dict("1"), "unknown")
    lazy = json.loads(encode_pack(replace(pack, kv=None)).metadata)
    found = read_header(rebuild({**lazy, "fingerprint": unknown}, version="1")).pack
    assert found.fingerprint == ModelFingerprint.unknown()


@pytest.mark.parametrize("other", [{"format": "pt"}, {"digest": "0" * 32}, {"more": "1"}, {"version": 1}])
def test_malformed_metadata_are_corrupt(other):
    with pytest.raises(PackCorruptError):
        read_header(rebuild(LAZY, **other))


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


@pytest.mark.parametrize("which", [2, 3])
def test_a_huge_compressed_shape_allocates_nothing(which):
    content = json.loads(encode_pack(PACKS[which]).metadata)
    entries = {f"layers.{i // 2}.{'value' if i % 2 else 'key'}": 0 for i in range(4)}
    for name in entries:
        content["tensors"][name] = {"digest": "0" * 32, "shape": [2**40, 5, 2**40], "stored": 64}
        entries[name] = {"dtype": "U8", "shape": [64], "data_offsets": [64 * list(entries).index(name)] * 2}
        entries[name]["data_offsets"][1] += 64
    with pytest.raises(PackCorruptError):
        read_pack(rebuild(content, entries=entries, data=bytes(256), version="3"))


def test_a_huge_shape_allocates_nothing():
    tensors = {name: {"digest": "", "shape": [2**40, 5, 2**40]} for name in CONTENT["tensors"]}
    header = read_header(rebuild({**CONTENT, "tensors": tensors}))
    assert header.damage is not None
    with pytest.raises(PackCorruptError):
        read_pack(rebuild({**CONTENT, "tensors": tensors}))


PACKS = [make_pack(kv=False), make_pack(), make_pack().compressed("lossless"), make_pack().compressed("int8")]
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
        found = read_pack(broken)
    except (PackCorruptError, PackVersionError):
        return
    assert same(found, PACKS[which])


@pytest.mark.parametrize("which", [1, 2])
def test_every_single_bit_of_a_small_file(which):
    """All positions, one bit each: the head's checks alone decide, as tensors are covered by digests."""
    intact, expected = DATA[which], PACKS[which]
    unnoticed = 0
    for at in range(len(intact)):
        broken = intact[:at] + bytes([intact[at] ^ (1 << at % 8)]) + intact[at + 1 :]
        try:
            found = read_pack(broken)
        except PackCorruptError:
            continue
        unnoticed += 1
        assert same(found, expected)
    assert unnoticed <= 64  # Padding alone may change unnoticed.
