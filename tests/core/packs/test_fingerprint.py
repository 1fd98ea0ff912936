"""Identity and numerics of a model, and what a mismatch says."""

from dataclasses import fields, replace

import pytest

from kp_core.errors import FingerprintMismatchError, PackCorruptError
from kp_core.packs.fingerprint import NUMERICS, ModelFingerprint
from kp_core.packs.pack import KnowledgePack, Prefix

NAMES = [field.name for field in fields(ModelFingerprint)]
ONE = ModelFingerprint(**{name: f"the {name}" for name in NAMES})
PACK = KnowledgePack("Paris.", "geo", (), Prefix(), ONE)


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_of_identity_or_numerics(name):
    other = replace(ONE, **{name: "another"})
    assert ONE.diff(other) == {name: (f"the {name}", "another")}
    assert other.id != ONE.id
    assert (other.identity != ONE.identity) == (name not in NUMERICS)
    assert ONE.same_model(other) == (name in NUMERICS)


def test_fields_do_not_run_into_one_another():
    assert replace(ONE, weights="a", adapters="b c").identity != replace(ONE, weights="a b", adapters="c").identity


def test_equal_fingerprints_have_equal_digests():
    again = ModelFingerprint.from_dict(ONE.to_dict())
    assert (again, again.id, again.identity) == (ONE, ONE.id, ONE.identity)
    assert again.diff(ONE) == {}


OLD = {**{name: value for name, value in ONE.to_dict().items() if name != "passes"}, "cuts": "1", "chunk_tokens": "96"}


def test_a_fingerprint_of_an_earlier_release_is_of_the_same_model_in_other_numerics():
    old = ModelFingerprint.from_dict(OLD)
    assert old.is_earlier
    assert not ONE.is_earlier
    assert old.same_model(ONE)
    assert old.identity == ONE.identity
    assert old.diff(ONE) == {"passes": ("cut by rule 1 every 96", "the passes")}
    for version in ("2", "3", "4"):
        assert old.to_dict(version) == OLD
    assert ModelFingerprint.from_dict(old.to_dict()) == old, "it stays one in files of this release"


@pytest.mark.parametrize("passes", ["any", "", "tiles of 256, torch 2.13.0, AVX512 bf16", "cut by rule 1", "unknown"])
def test_what_this_release_computes_is_of_no_earlier_one(passes):
    assert not replace(ONE, passes=passes).is_earlier


def test_each_chunk_length_and_rule_of_an_earlier_release_has_numerics_of_its_own():
    found = [
        ModelFingerprint.from_dict({**OLD, "cuts": rule, "chunk_tokens": count}) for rule in "12" for count in "34"
    ]
    assert len({each.id for each in found}) == len(found)
    assert all(each.is_earlier for each in found)


def test_what_is_unknown_is_so_in_every_version():
    unknown = ModelFingerprint.unknown()
    assert set(unknown.diff(ONE)) == set(NAMES)
    for version in ("2", "3", "4", "5"):
        assert ModelFingerprint.from_dict(unknown.to_dict(version)) == unknown
    assert not unknown.is_earlier


@pytest.mark.parametrize("change", [{"weights": 1}, {"more": "a"}, {"weights": None}, dict.fromkeys("xyz", "a")])
def test_other_fields_are_refused(change):
    with pytest.raises(PackCorruptError, match="fingerprint fields"):
        ModelFingerprint.from_dict({**ONE.to_dict(), **change})
    with pytest.raises(PackCorruptError, match="fingerprint fields"):
        ModelFingerprint.from_dict({**OLD, **change})
    for whole in (ONE.to_dict(), OLD):
        for left_out in whole:
            with pytest.raises(PackCorruptError, match="fingerprint fields"):
                ModelFingerprint.from_dict({name: value for name, value in whole.items() if name != left_out})
    with pytest.raises(PackCorruptError, match="fingerprint fields"):
        ModelFingerprint.from_dict({**OLD, "passes": "any"})


def test_a_mismatch_says_whether_it_is_another_model():
    with pytest.raises(FingerprintMismatchError, match="not made by this model") as caught:
        PACK.check(replace(ONE, weights="others", dtype="another"))
    assert not caught.value.same_model
    assert 'mismatch="rebuild"' in str(caught.value)
    with pytest.raises(FingerprintMismatchError, match="by this model with other numerics") as caught:
        PACK.check(replace(ONE, dtype="another"))
    assert caught.value.same_model
    assert 'mismatch="rebuild"' in str(caught.value)
    PACK.check(ONE)
