"""Steered KV for servers: named by clients, signed, kept plain and altered when it is read."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kp_core import BlendComposer, KVTensors, PackStore, Prefix
from kp_core.engines.local.altered import altered as alter
from kp_core.engines.request import Request
from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altered import Altered, asked, digest_of
from kp_core.engines.vllm.pieces import StoredPieces
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.errors import PackError, UnsupportedRequestError
from kp_core.steering import preset
from tests.conftest import tiny_engine
from tests.core.engines.gate import remote
from tests.core.engines.test_serving import KEY, TEXT, Gate, served

__all__ = ["remote"]

OTHER = "The lighthouse of Vint Harbour was built by Osk Merrel in the year 214 and painted yellow by his sister."


@pytest.fixture(scope="module")
def formal():
    return tiny_engine().make_steering(preset("formal")[:2], progress=False)


def planned(remote, messages, **options):
    return remote._plan(messages, Request.of(options))[0]


def named(plan):
    """What a client sends for a plan, and what the server reads of it."""
    ids = list(plan.prompt.token_ids)
    return asked(plan), ids, Altered.of(asked(plan), ids, served(tiny_engine()))


def test_what_is_read_is_what_the_local_engine_alters(tmp_path, remote, formal):
    session, pieces = tiny_engine(), StoredPieces(PackStore(tmp_path), served(tiny_engine()))
    own = [pieces.store.put(session.build_pack(text, namespace="a")) for text in (TEXT, OTHER)]
    said = zip(("user", "assistant", "user"), (f"{own[0]}", "So.", f"{own[1]}\nWho?"), strict=True)
    conversation = [{"role": role, "content": content} for role, content in said]
    memory = [session.build_pack(text).steer(formal, 1.5) for text in (TEXT, OTHER)]
    for plan in (
        planned(remote, "Who rings it?", steering=(formal, 2.0)),
        planned(remote, "Who rings it?", steering=formal, scope="prompt"),
        planned(remote, "Who rings it?", packs=memory),
        planned(remote, conversation, view=pieces.store.view("a"), steering=formal),
    ):
        _, ids, found = named(plan)
        local = [region for region in plan.regions if region.parts]
        assert [found.block(n).label for n in range(len(local))] == [region.label for region in local]
        last = local[-1]
        whole = next(session.engine.kv([session._planner.wanted(Prefix(), ids[: last.stop])]))
        step = found.until(len(local) - 1, ids)
        below = step.leaves(pieces.model, ("a",), ids[: last.stop])
        assert not pieces.store.kept.has(below.key, ("a",))
        pieces.write(below, whole)
        loaded = found.begins(pieces.model, ("a",), ids)
        assert loaded.key == below.key
        expected = [whole.slice(0, last.start), alter(whole.slice(last.start, last.stop), last)]
        for start in (0, 5, last.stop - 1):
            read = pieces.read(loaded, start)
            assert read.equal(KVTensors.concat(expected).slice(start, last.stop))
        assert not read.equal(whole.slice(start, last.stop))
        for wrong in (replace(loaded, namespaces=("b",)), replace(loaded, namespaces=())):
            with pytest.raises(PackError, match="altered"):
                pieces.read(wrong, 0)
    assert len(local) == 2


def test_rights_to_alter_count_for_one_prompt_and_one_salt(remote, formal):
    _, ids, found = named(planned(remote, "Who rings it?", steering=formal))
    rights = Rights(("a",), "salt", altered=found)
    signed = rights.sign(KEY)
    assert Rights.read(signed, "salt", KEY).altered == found
    assert Rights.read(signed, "other", KEY) is None
    assert Rights.read(signed, "salt", KEY[::-1]) is None
    assert found.tokens == digest_of(ids) != digest_of(ids[1:])
    late = Rights.read(replace(rights, expires=time.time() - 1).sign(KEY), "salt", KEY)
    assert (late.altered, late.namespaces, late.save) == (found, (), False)


def test_salts_differ_wherever_kv_does(remote, formal):
    ask = "Who rings it?"
    scopes = ("system", "prompt")
    plans = [planned(remote, ask, steering=(formal, alpha), scope=each) for alpha in (1, 2) for each in scopes]
    labels = [named(plan)[2].label for plan in plans]
    other = planned(remote, "Who rang it, then?", steering=formal, scope="system")
    assert named(other)[2].label == labels[0]  # The same head, altered alike.
    salts = {salt_of(names, KEY, label) for names in (["a"], ["b"]) for label in ("", *labels)}
    assert len(salts) == 10
    assert all(salt.isalnum() and len(salt) <= 128 for salt in salts)


def test_entries_of_other_readers_and_of_deleted_packs_are_gone(tmp_path, remote, formal):
    session, store = tiny_engine(), PackStore(tmp_path)
    handle = store.put(session.build_pack(TEXT, namespace="a"))
    plan = planned(remote, f"{handle}\nWho?", view=store.view("a"), steering=formal)
    said, ids, found = named(plan)
    assert [each[0] for each in said["packs"]] == [str(handle)]
    step, stop = found.until(0, ids), found.blocks[0][1]
    keys = [step.key(served(session), names, ids[:stop]) for names in (["a"], ["a", "b"], ["b"])]
    assert len({key.before for key in keys}) == 3
    store.kept.write(keys[0], next(session.engine.kv([session._planner.wanted(Prefix(), ids[:stop])])))
    assert store.kept.has(keys[0], ["a"])
    store.remove(handle)
    assert not store.kept.has(keys[0], ["a"])


def test_composers_are_refused_by_name(tmp_path, remote):
    session, store = tiny_engine(), PackStore(tmp_path)
    packs = [replace(session.build_pack(text, namespace="a"), fingerprint=remote.fingerprint) for text in (TEXT, OTHER)]
    handles = [store.put(pack) for pack in packs]
    with pytest.raises(UnsupportedRequestError, match="composer='blend"):
        remote.stream(f"{handles[0]}\n{handles[1]}\nWho?", view=store.view("a"), composer=BlendComposer())


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path, tiny_engine(), Access(("a",), write=True))


def sent(gate, said, ids, **more):
    done = gate.ask("POST", "/v1/completions", {"prompt": ids, "kp": said, "max_tokens": 4, **more})
    return done, done.json() if done.status_code == 200 else done.json()["error"]["message"]


def test_the_server_signs_what_a_client_names(gate, remote, formal):
    said, ids, found = named(planned(remote, "Who rings it?", steering=formal))
    step, stop = found.until(0, ids), found.blocks[0][1]
    identity = gate.gate.desk.identity
    session = tiny_engine()
    gate.store.kept.write(
        step.key(identity, ["a"], ids[:stop]),
        next(session.engine.kv([session._planner.wanted(Prefix(), ids[:stop])])),
    )
    forged = Rights(("b",), "mine", altered=found).sign(b"x" * 32)
    done, _ = sent(gate, said, ids, cache_salt="mine", kv_transfer_params=forged)
    assert done.headers["kp-computed-tokens"] == "0"
    [(_, body)] = gate.seen
    assert "kp" not in body
    assert body["cache_salt"] == salt_of(["a"], KEY, found.label)
    rights = Rights.read(body["kv_transfer_params"], body["cache_salt"], KEY)
    assert (rights.namespaces, rights.save) == (("a",), False)
    # A steering may lie in a file in several ways.
    assert replace(rights.altered, steerings={}) == replace(found, steerings={})
    assert rights.altered.label == found.label


def test_what_cannot_be_steered_is_said(gate, remote, formal):
    said, ids, _ = named(planned(remote, "Who rings it?", steering=formal))
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
    plan = SimpleNamespace(
        regions=planned(remote, "Who rings it?", steering=formal).regions, prompt=SimpleNamespace(spans=())
    )
    steered = next(region for region in plan.regions if region.parts)
    part = replace(steered.parts[0], steering=other)
    plan.regions = [replace(steered, parts=(part,))]
    done, message = sent(gate, asked(plan), ids)
    assert (done.status_code, "weights" in message) == (400, True)
    assert not gate.seen
