"""MACs of entries: what a server with a key reads is what a server with that key wrote."""

from dataclasses import replace

import pytest
import torch

from kp_core import KVTensors, PackStore, Prefix
from kp_core.packs.file import encode_pack, has_mac, with_mac
from kp_core.packs.kept import KeptEntry
from tests.conftest import tiny_engine

KEY, OTHER = b"k" * 32, b"o" * 32
TEXT = "The harbour bell of Vint is rung by Oda Wick at noon, and nobody knows for whom it is rung any more."


@pytest.fixture(scope="module")
def pack():
    return tiny_engine().build_pack(TEXT, namespace="a")


def changed(kv):
    return KVTensors(kv.keys, (kv.values[0] + 1, *kv.values[1:]))


def test_a_seal_holds_for_what_was_sealed_and_for_nothing_else(pack):
    sealed = with_mac(pack, KEY)
    assert has_mac(encode_pack(sealed), KEY)
    assert not has_mac(encode_pack(sealed), OTHER)
    assert not has_mac(encode_pack(pack), KEY)
    for wrong in (
        replace(sealed, kv=changed(pack.kv)),
        replace(sealed, text=TEXT + "."),
        replace(sealed, namespace="b"),
        replace(sealed, prefix=Prefix((1,))),
        replace(sealed, token_ids=(*pack.token_ids[:-1], 0)),
        replace(sealed, fingerprint=replace(pack.fingerprint, weights="x")),
        replace(sealed, provenance={**sealed.provenance, "title": "x"}),
        replace(sealed, kv=KVTensors(pack.kv.values, pack.kv.keys)),
    ):
        assert not has_mac(encode_pack(wrong), KEY)


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_store_tells_by_the_head_of_a_file_whether_it_is_sealed(tmp_path, pack, compression):
    store, open_to_all = PackStore(tmp_path, seal=KEY), PackStore(tmp_path)
    handle = store.put(pack.compressed(compression))
    assert not store.is_sealed(handle, pack.key)
    assert open_to_all.is_sealed(handle, pack.key)
    store.put(store.sealed(pack).compressed(compression))
    assert store.is_sealed(handle, pack.key)
    assert has_mac(encode_pack(store.get(handle)), KEY)
    assert not PackStore(tmp_path, seal=OTHER).is_sealed(handle, pack.key)
    # Whoever writes there makes digests anew, and keeps what stood beside.
    store.put(replace(store.get(handle), kv=changed(pack.kv)).compressed(compression))
    assert torch.equal(store.get(handle).kv.values[0], changed(pack.kv).values[0])
    assert not store.is_sealed(handle, pack.key)


def test_what_is_kept_is_read_with_its_seal_alone(tmp_path, pack):
    key = KeptEntry(pack.fingerprint, 0, "x", pack.token_ids, (), "a")
    stores = {seal: PackStore(tmp_path, seal=seal) for seal in (None, KEY, OTHER)}
    stores[None].write_kept(key, pack.kv)
    assert stores[None].read_kept(key, ["a"]).equal(pack.kv)
    assert not stores[KEY].has_kept(key, ["a"])
    assert stores[KEY].read_kept(key, ["a"]) is None
    stores[KEY].write_kept(key, pack.kv)
    assert stores[KEY].read_kept(key, ["a"]).equal(pack.kv)
    assert stores[None].has_kept(key, ["a"])
    assert not stores[OTHER].has_kept(key, ["a"])
