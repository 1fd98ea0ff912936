"""MACs of entries: what a server with a key reads is what a server with that key wrote."""

from dataclasses import replace

import pytest

from kp_core import KVTensors, PackStore
from kp_core.packs.entry import Entry, encode_entry, open_entry
from tests.conftest import tiny_engine
from tests.core.packs.made import entry_of

KEY, OTHER = b"k" * 32, b"o" * 32
TEXT = "The harbour bell of Vint is rung by Oda Wick at noon, and nobody knows for whom it is rung any more."


@pytest.fixture(scope="module")
def pack():
    return tiny_engine().build_pack(TEXT, namespace="a")


def changed(kv):
    return KVTensors(kv.keys, (kv.values[0] + 1, *kv.values[1:]))


def test_a_seal_holds_for_what_was_sealed_and_for_nothing_else(pack):
    entry, sealed = entry_of(pack), encode_entry(entry_of(pack), pack.kv, seal=KEY)
    assert sealed.has_mac(KEY)
    assert open_entry(b"".join(sealed.chunks())).read().equal(pack.kv)
    assert not sealed.has_mac(OTHER)
    assert not encode_entry(entry, pack.kv).has_mac(KEY)
    ids = (*pack.token_ids[:-1], 0)
    wrong = [encode_entry(entry, kv, seal=KEY) for kv in (changed(pack.kv), KVTensors(pack.kv.values, pack.kv.keys))]
    changes = [{"at": 1}, {"before": "x"}, {"token_ids": ids}, {"label": "x"}, {"owners": entry.owners | {"b"}}]
    changes.append({"model": replace(pack.fingerprint, weights="x")})
    wrong += [encode_entry(replace(entry, **change), pack.kv, seal=KEY) for change in changes]
    for file in wrong:
        assert file.has_mac(KEY)
        assert not replace(file, mac=sealed.mac).has_mac(KEY)


def test_the_digests_under_a_mac_are_those_that_nobody_can_forge(pack):
    plain, sealed = (encode_entry(entry_of(pack), pack.kv, seal=seal) for seal in (None, KEY))
    assert not set(plain.digests) & set(sealed.digests)


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_store_with_a_seal_reads_what_it_wrote_alone(tmp_path, pack, compression):
    store, open_to_all = PackStore(tmp_path, seal=KEY), PackStore(tmp_path)
    handle = open_to_all.put(pack.compressed(compression))
    assert store.peek(handle).stored_bytes == 0
    assert store.get(handle).is_lazy
    assert open_to_all.get(handle).kv.equal(pack.kv)
    store.put(pack.compressed(compression))
    assert store.get(handle).kv.equal(pack.kv)
    assert open_to_all.get(handle).kv.equal(pack.kv)
    assert PackStore(tmp_path, seal=OTHER).get(handle).is_lazy
    # Whoever writes there makes digests anew.
    open_to_all.put(replace(pack, kv=changed(pack.kv)).compressed(compression))
    assert open_to_all.get(handle).kv.equal(changed(pack.kv))
    assert store.get(handle).is_lazy


def test_what_is_kept_is_read_with_its_seal_alone(tmp_path, pack):
    key = Entry(pack.fingerprint, 0, "x", pack.token_ids, frozenset({"a"}))
    stores = {seal: PackStore(tmp_path, seal=seal) for seal in (None, KEY, OTHER)}
    stores[None].write(key, pack.kv)
    assert stores[None].read(key, ["a"]).equal(pack.kv)
    assert not stores[KEY].has(key, ["a"])
    assert stores[KEY].read(key, ["a"]) is None
    stores[KEY].write(key, pack.kv)
    assert stores[KEY].read(key, ["a"]).equal(pack.kv)
    assert stores[None].has(key, ["a"])
    assert not stores[OTHER].has(key, ["a"])
