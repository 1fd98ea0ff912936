"""Identity and numerics of a model, and what a mismatch says."""

from dataclasses import fields, replace

import pytest

from kp_core.errors import PackCorruptError, PackError
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


@pytest.mark.parametrize("change", [{"weights": 1}, {"more": "a"}, {"weights": None}, dict.fromkeys("xyz", "a")])
def test_other_fields_are_refused(change):
    with pytest.raises(PackCorruptError, match="fingerprint fields"):
        ModelFingerprint.from_dict({**ONE.to_dict(), **change})
    for left_out in ONE.to_dict():
        with pytest.raises(PackCorruptError, match="fingerprint fields"):
            ModelFingerprint.from_dict({name: value for name, value in ONE.to_dict().items() if name != left_out})


def test_a_mismatch_says_whether_it_is_another_model():
    with pytest.raises(PackError, match="not made by this model") as caught:
        PACK.check(replace(ONE, weights="others", dtype="another"))
    assert 'mismatch="rebuild"' in str(caught.value)
    with pytest.raises(PackError, match="by this model with other numerics") as caught:
        PACK.check(replace(ONE, dtype="another"))
    assert 'mismatch="rebuild"' in str(caught.value)
    PACK.check(ONE)
