"""The form of all files: what is written is read, the safetensors library agrees, and what a reader rejects."""

import json
from hashlib import blake2b

import pytest
import torch
from safetensors.torch import load, save

from kp_core.errors import PackCorruptError, PackError
from kp_core.packs.envelope import Envelope

PLAIN = Envelope("some-file", "about", "3", advice="Upgrade.")
COVERING = Envelope("some-file", "about", "1", covers_tensors=True)
CONTENT = {"name": "“é”\n", "numbers": [1, 2.5, None]}
TENSORS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.arange(8).view(4, 2).to(torch.bfloat16).T,
    "none": torch.zeros(0, 3, dtype=torch.float64),
}
both = pytest.mark.parametrize("envelope", [PLAIN, COVERING], ids=["plain", "covering"])


def metadata_of(data):
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def rebuilt(data, tensors=TENSORS, **changed):
    """The file as the library writes it, with other metadata or tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(contiguous, {**metadata_of(data), **changed})


@both
def test_what_is_written_is_read_and_the_library_agrees(envelope, tmp_path):
    data = envelope.write(CONTENT, TENSORS)
    content, tensors = envelope.read(data)
    assert content == CONTENT
    for found in (tensors, load(data)):
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert data == envelope.write(dict(reversed(CONTENT.items())), TENSORS)
    assert int.from_bytes(data[:8], "little") % 64 == 56
    assert metadata_of(data)["version"] == envelope.version
    assert envelope.load(envelope.save(tmp_path / "new" / "file", CONTENT, TENSORS))[0] == CONTENT


@both
def test_files_that_the_library_wrote_are_read(envelope):
    content, tensors = envelope.read(rebuilt(envelope.write(CONTENT, TENSORS)))
    assert content == CONTENT
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@both
@pytest.mark.parametrize(
    "changed",
    [{"digest": "0" * 32}, {"about": "{}"}, {"format": "other"}, {"more": "1"}, {"version": "9"}],
    ids=["digest", "content", "format", "more", "version"],
)
def test_other_metadata_are_refused(envelope, changed):
    with pytest.raises(PackCorruptError):
        envelope.read(rebuilt(envelope.write(CONTENT, TENSORS), **changed))


def test_versions_are_told_from_damage():
    text = json.dumps(CONTENT)
    for version in ("2", "3", "4"):
        digest = blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()
        data = rebuilt(PLAIN.write(CONTENT, TENSORS), version=version, digest=digest, about=text)
        if version == PLAIN.version:
            assert PLAIN.read(data)[0] == CONTENT
        else:
            with pytest.raises(
                PackError, match=rf"version '{version}' of the format 'some-file'.*version '3'\. Upgrade"
            ):
                PLAIN.read(data)


@pytest.mark.parametrize(
    "tensors",
    [
        {**TENSORS, "b": TENSORS["b"] + 1},
        {**TENSORS, "b": TENSORS["b"].view(3, 2)},
        {**TENSORS, "b": TENSORS["b"].to(torch.float64)},
        {**TENSORS, "c": TENSORS["b"] + 0},
        {"a": TENSORS["a"]},
    ],
)
def test_a_digest_that_covers_tensors_tells_others(tensors):
    data = rebuilt(COVERING.write(CONTENT, TENSORS), tensors)
    assert load(data).keys() == tensors.keys()
    with pytest.raises(PackCorruptError, match="digest"):
        COVERING.read(data)


@both
def test_a_flipped_bit_of_the_header_is_seen(envelope):
    data = envelope.write(CONTENT, TENSORS)
    stop = 8 + int.from_bytes(data[:8], "little")
    metadata = range(data.index(b"__metadata__"), data.index(b'},"b"'))
    for at in [*range(8), *metadata, stop - 1]:
        with pytest.raises(PackCorruptError):
            envelope.read(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for damaged in (b"", data[:7], data[: stop - 1], data[:-1], data + b"x"):
        with pytest.raises(PackCorruptError):
            envelope.read(damaged)


def test_a_file_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(PackCorruptError, match="expected at most"):
        PLAIN.load(tmp_path / "large")
