"""Steered KV for servers: named by clients, signed, kept plain and altered when it is read."""

import time
from dataclasses import replace

import pytest

from kp_core import KVTensors, PackStore, Prefix
from kp_core.errors import PackError, UnsupportedRequestError
from kp_core.packs.entry import digest_of
from kp_core.plan.request import Request
from kp_core.steering import preset
from kp_serve.asked import asked, blocks_as_json, steered
from kp_serve.preparing import steered_steps
from kp_serve.rights import Rights, salt_of
from kp_serve.stored import StoredKV
from kp_serve.wire import Access
from tests.conftest import tiny_engine
from tests.kits import NaiveComposer
from tests.serve.gate import remote
from tests.serve.test_serving import KEY, TEXT, Gate, read, served

__all__ = ["remote"]

OTHER = "The lighthouse of Vint Harbour was built by Osk Merrel in the year 214 and painted yellow by his sister."


@pytest.fixture(scope="module")
def formal():
    return tiny_engine().make_steering(preset("formal")[:2], progress=False)


def planned(remote, messages, **options):
    return remote._plan(messages, Request.of(options))


def blocks_of(plan):
    """The blocks that the server reads of what a client sends for a plan, and the packs."""
    return steered(asked(plan), list(plan.prompt.token_ids), served(tiny_engine()))


def rights_of(plan, names=("a",)):
    """Those of the requests that the server makes of it, the client's own last."""
    model, ids = served(tiny_engine()), list(plan.prompt.token_ids)
    return [rights for _, rights in steered_steps(names, KEY, model, ids, *blocks_of(plan))]


def test_what_is_read_is_what_the_local_engine_alters(tmp_path, remote, formal):
    session, stored = tiny_engine(), StoredKV(PackStore(tmp_path), served(tiny_engine()))
    own = [stored.store.put(session.build_pack(text, namespace="a")) for text in (TEXT, OTHER)]
    said = zip(("user", "assistant", "user"), (f"{own[0]}", "So.", f"{own[1]}\nWho?"), strict=True)
    conversation = [{"role": role, "content": content} for role, content in said]
    memory = [session.build_pack(text).steer(formal, 1.5) for text in (TEXT, OTHER)]
    for plan in (
        planned(remote, "Who rings it?", steering=(formal, 2.0)),
        planned(remote, "Who rings it?", steering=formal, scope="prompt"),
        planned(remote, "Who rings it?", packs=memory),
        planned(remote, conversation, view=stored.store.view("a"), steering=formal),
    ):
        ids, rights = plan.prompt.token_ids, rights_of(plan)
        local = [region for region in plan.regions if region.parts]
        assert [block.label for block in blocks_of(plan)[0]] == [region.label for region in local]
        last = local[-1]
        whole = next(session.engine.kv([session._planner.plan_kv(Prefix(), ids[: last.stop])]))
        assert [each.tokens for each in rights] == [digest_of(ids[: block.stop]) for block in local] + [digest_of(ids)]
        assert (rights[0].begins, rights[-1].keeps) == ((), None)
        below, loaded = (rights[-2].keeps,), rights[-1].begins
        assert not stored.has(below, ["a"])
        stored.write(below, whole)
        assert replace(loaded[0], block="") == rights[-2].keeps
        expected = [whole.slice(0, last.start), last.steered(whole.slice(last.start, last.stop))]
        for start in (0, last.stop // 2, last.stop - 1):
            found = read(stored, loaded, start)
            assert found.equal(KVTensors.concat(expected).slice(start, last.stop))
        assert not found.equal(whole.slice(start, last.stop))
        for names in (["b"], []):
            with pytest.raises(PackError, match="is not stored"):
                read(stored, loaded, names=names)
    assert len(local) == 2


def test_rights_to_alter_count_for_one_prompt_and_one_salt(remote, formal):
    plan = planned(remote, "Who rings it?", steering=formal)
    ids, (first, rights) = plan.prompt.token_ids, rights_of(plan)
    found = Rights.read(rights.sign(KEY), rights.salt, KEY)
    assert replace(found, expires=0.0) == rights
    assert replace(Rights.read(first.sign(KEY), first.salt, KEY), expires=0.0) == first
    assert Rights.read(rights.sign(KEY), "other", KEY) is None
    assert Rights.read(rights.sign(KEY), rights.salt, KEY[::-1]) is None
    assert found.tokens == digest_of(ids) != digest_of(ids[1:])
    over = time.time() - 1
    late = Rights.read(replace(rights, expires=over).sign(KEY), rights.salt, KEY)
    assert (late.begins, late.namespaces, late.save) == (rights.begins, (), False)
    assert Rights.read(replace(first, expires=over).sign(KEY), first.salt, KEY) is None  # Nothing of it is altered.


def test_salts_differ_wherever_kv_does(remote, formal):
    ask = "Who rings it?"
    scopes = ("system", "prompt")
    plans = [planned(remote, ask, steering=(formal, alpha), scope=each) for alpha in (1, 2) for each in scopes]
    salts = [rights_of(plan, names)[-1].salt for plan in plans for names in (("a",), ("b",))]
    other = planned(remote, "Who rang it, then?", steering=formal, scope="system")
    assert rights_of(other)[-1].salt == salts[0]  # The same head, altered alike.
    salts += [salt_of(names, KEY) for names in (["a"], ["b"])]
    assert len(set(salts)) == 10
    assert all(salt.isalnum() and len(salt) <= 128 for salt in salts)


def test_entries_of_other_readers_and_of_deleted_packs_are_gone(tmp_path, remote, formal):
    session, store = tiny_engine(), PackStore(tmp_path)
    handle = store.put(session.build_pack(TEXT, namespace="a"))
    plan = planned(remote, f"{handle}\nWho?", view=store.view("a"), steering=formal)
    assert [each[0] for each in asked(plan)["packs"]] == [str(handle)]
    kept = [rights_of(plan, names)[0].keeps for names in (("a",), ("a", "b"), ("b",))]
    assert len({each.entry.key for each in kept}) == 3
    key = kept[0].entry
    store.write(key, next(session.engine.kv([session._planner.plan_kv(Prefix(), key.token_ids)])))
    assert store.has(key, ["a"])
    store.remove(handle)
    assert not store.has(key, ["a"])


def test_composers_are_refused_by_name(tmp_path, remote):
    session, store = tiny_engine(), PackStore(tmp_path)
    packs = [replace(session.build_pack(text, namespace="a"), fingerprint=remote.fingerprint) for text in (TEXT, OTHER)]
    handles = [store.put(pack) for pack in packs]
    with pytest.raises(UnsupportedRequestError, match="composer='naive"):
        remote.stream(f"{handles[0]}\n{handles[1]}\nWho?", view=store.view("a"), composer=NaiveComposer())


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path, tiny_engine(), Access(("a",), write=True))


def sent(gate, said, ids, **more):
    done = gate.ask("POST", "/v1/completions", {"prompt": ids, "kp": said, "max_tokens": 4, **more})
    return done, done.json() if done.status_code == 200 else done.json()["error"]["message"]


def test_the_server_signs_what_a_client_names(gate, remote, formal):
    plan = planned(remote, "Who rings it?", steering=formal)
    said, ids, (first, own) = asked(plan), list(plan.prompt.token_ids), rights_of(plan)
    key, session = first.keeps.entry, tiny_engine()
    gate.store.write(key, next(session.engine.kv([session._planner.plan_kv(Prefix(), key.token_ids)])))
    forged = replace(own, namespaces=("b",), salt="mine").sign(b"x" * 32)
    done, _ = sent(gate, said, ids, cache_salt="mine", kv_transfer_params=forged)
    assert done.headers["kp-computed-tokens"] == "0"
    [(_, body)] = gate.seen
    assert "kp" not in body
    assert body["cache_salt"] == own.salt
    rights = Rights.read(body["kv_transfer_params"], body["cache_salt"], KEY)
    assert replace(rights, expires=0.0) == own
    assert (rights.namespaces, rights.save) == (("a",), False)


def test_what_cannot_be_steered_is_said(gate, remote, formal):
    plan = planned(remote, "Who rings it?", steering=formal)
    said, ids = asked(plan), list(plan.prompt.token_ids)
    (start, stop, parts), name = said["blocks"][0], next(iter(said["steerings"]))
    for wrong, prompt, expected in (
        (3, ids, "Expected 'kp'"),
        (said | {"more": 1}, ids, "Expected 'kp'"),
        (said, "text", "token ids"),
        (said, [ids], "token ids"),
        (said | {"blocks": []}, ids, "expected 1 to"),
        (said | {"blocks": [[start, len(ids), parts]]}, ids, "expected 1 to"),
        (said | {"blocks": [[-1, stop, parts]]}, ids, "expected 1 to"),
        (said | {"blocks": [[start, stop, parts]] * 2}, ids, "expected 1 to"),
        (said | {"blocks": [[start, stop, [[start, stop, "x"]]]]}, ids, "cannot be read"),
        (said | {"blocks": 5}, ids, "cannot be read"),
        (said | {"steerings": {name: "%"}}, ids, "cannot be read"),
        (said | {"steerings": {name: "aGVsbG8="}}, ids, "no intact steering"),
    ):
        done, message = sent(gate, wrong, prompt)
        assert (done.status_code, expected in message) == (400, True), message
    other = tiny_engine("qwen3").make_steering(preset("formal")[:1], progress=False)
    block = next(region for region in plan.regions if region.parts)
    part = replace(block.parts[0], steering=other)
    done, message = sent(gate, blocks_as_json([replace(block, parts=(part,))]), ids)
    assert (done.status_code, "weights" in message) == (400, True)
    assert not gate.seen
