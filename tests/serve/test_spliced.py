"""Packs that servers move: named by clients, signed, compiled and laid where a prompt has them."""

import json
import time
from dataclasses import replace

import pytest
import torch

from kp_core import KVTensors, PackStore
from kp_core.engines.hf.unloaded import token_embeddings
from kp_core.errors import PackError, UnsupportedRequestError
from kp_core.packs.entry import Entry, digest_of
from kp_core.packs.handle import Handle
from kp_core.packs.pack import PackKey
from kp_core.plan.request import Request
from kp_core.rope import Rope
from kp_methods import PacketComposer
from kp_serve.asked import asked, moved_packs, soft_as_text, soft_of
from kp_serve.preparing import laid_steps
from kp_serve.rights import Rights, salt_of
from kp_serve.stored import Part, StoredKV
from tests.conftest import tiny_engine
from tests.kits import tiny_model
from tests.parity.families import model_of
from tests.serve.gate import remote, server
from tests.serve.test_serving import KEY, TEXT, read, served

__all__ = ["remote", "server"]

TEXTS = [TEXT, TEXT.replace("bell", "horn"), TEXT.replace("Oda", "Ada"), TEXT.replace("noon", "dusk")]


def handles_of(remote, store, *, compiled=True):
    """Packs as a server of the tiny model keeps them."""
    packs = [remote.build_pack(text, namespace="a") for text in TEXTS]
    made = [replace(pack, kv=tiny_engine().build_pack(pack.text).kv) if compiled else pack for pack in packs]
    return [store.put(pack) for pack in made]


def said_of(remote, store, handles, content="{}\n{}\n{}\n{}\nWho?"):
    """What a client sends, and the token ids of the prompt."""
    options = {"view": store.view("a"), "composer": "splice"}
    plan = remote._plan(content.format(*handles), Request.of(options))
    return json.loads(json.dumps(asked(plan))), list(plan.prompt.token_ids)


def laid(store, said, ids, *, change=list):
    """The packs that a client names, and the rights of the requests that the server makes of it, its own last."""
    moved, packs = moved_packs(said, ids)
    prefix = pack_of(store, said).prefix
    model = served(tiny_engine())
    parts = [Part(start, Entry.of_pack(handle, model, prefix, tuple(ids[start:stop]))) for start, stop, handle in moved]
    return moved, [rights for _, rights in laid_steps(("a",), KEY, ids, change(parts), packs)]


def test_packs_lie_where_the_prompt_has_them_and_what_is_between_as_it_was_kept(tmp_path, remote):
    session, store, model = tiny_engine(), PackStore(tmp_path), served(tiny_engine())
    rope = session.engine.model.rope
    stored = StoredKV(store, model, rope=Rope.from_dict(json.loads(json.dumps(rope.to_dict()))))
    said, ids = said_of(remote, store, handles_of(remote, store))
    moved, rights = laid(store, said, ids)
    assert len(moved) == 3  # The first one stands where it was compiled.
    run = rights[-1].begins
    assert [part.start for part in run[1:]] == [part.stop for part in run[:-1]]
    assert (run[0].start, run[-1].stop) == (0, moved[-1][1])
    with pytest.raises(PackError, match="is not stored"):
        read(stored, run)
    made, expected = torch.Generator().manual_seed(1), []
    of_packs = [part for part in run if part.by]
    assert len(of_packs) == len(moved)
    for part in run:
        if part in of_packs:
            pack = store.get(part.entry.handles[0], PackKey(model))
            expected.append(rope.move(pack.kv, part.start - len(pack.prefix)))
            continue
        shapes = [(len(key), part.stop - part.start, key.shape[2]) for key in pack_of(store, said).kv.keys]
        tensors = [tuple(torch.randn(shape, generator=made) for shape in shapes) for _ in range(2)]
        expected.append(KVTensors(*tensors))
        [step] = [each for each in rights if each.keeps == part]
        assert step.tokens == digest_of(ids[: part.stop])
        assert step.begins == run[: run.index(part)]
        stored.write((part,), expected[-1])
    whole = KVTensors.concat(expected)
    for start, stop in ((0, run[-1].stop), (7, run[-1].stop), (run[2].start + 1, run[3].stop - 1)):
        assert read(stored, run, start, stop).equal(whole.slice(start, stop))
    with pytest.raises(PackError, match="cannot be moved"):
        read(StoredKV(store, model), run)
    # Neither what was kept nor packs: rights that are over, or of an adapter's request, name no namespace.
    for alone in (of_packs, [part for part in run if part not in of_packs]):
        assert read(stored, alone, alone[0].start).tokens
        for names in ((), ("b",)):
            with pytest.raises(PackError, match="may not be read"):
                read(stored, alone, names=names)
    store.remove(Handle.parse(said["moved"][1][2]))
    with pytest.raises(PackError):
        read(stored, run)


def pack_of(store, said):
    return store.get(Handle.parse(said["moved"][0][2]))


def test_rights_to_move_count_for_one_prompt_and_one_salt(tmp_path, remote):
    store = PackStore(tmp_path)
    said, ids = said_of(remote, store, handles_of(remote, store))
    rights = laid(store, said, ids)[1][-1]
    assert replace(Rights.read(rights.sign(KEY), rights.salt, KEY), expires=0.0) == rights
    assert Rights.read(rights.sign(KEY), "other", KEY) is None
    late = Rights.read(replace(rights, expires=time.time() - 1).sign(KEY), rights.salt, KEY)
    assert (late.begins, late.namespaces) == (rights.begins, ())  # It fails, and computes no plain KV under this salt.
    others = [
        lambda parts: parts[:-1],
        lambda parts: parts[::-1],
        lambda parts: [replace(part, entry=replace(part.entry, at=1)) for part in parts],
    ]
    salts = {laid(store, said, ids, change=change)[1][-1].salt for change in (list, *others)}
    assert len(salts) == 4


def test_the_server_compiles_and_computes_what_is_missing_once(server, remote):
    said, ids = said_of(remote, server.store, handles_of(remote, server.store, compiled=False))

    def ask(key="a"):
        body = {"prompt": ids, "kp": said, "max_tokens": 4, "cache_salt": "mine", "kv_transfer_params": {"kp": "mine"}}
        server.seen.clear()
        return server.ask("POST", "/v1/completions", body, key)

    assert ask("reader").status_code == 403  # It compiles nothing.
    assert ask("b").status_code == 404
    assert not server.seen
    assert ask().status_code == 200
    starts, stops = ([each[at] for each in said["moved"]] for at in (0, 1))
    stops = [start for done, start in zip([0, *stops], starts, strict=False) if done < start]
    assert [len(body["prompt"]) for _, body in server.seen[3:]] == [*stops, len(ids)]
    assert server.computed == 3
    salts = {body["cache_salt"] for _, body in server.seen[3:]}
    assert len(salts) == 1
    assert salts.isdisjoint({"mine", salt_of(["a"], KEY)})
    for key in ("a", "reader"):
        done = ask(key)
        assert (done.status_code, done.headers["kp-computed-tokens"]) == (200, "0")
        [(_, body)] = server.seen
        assert "kp" not in body
    rights = Rights.read(body["kv_transfer_params"], body["cache_salt"], KEY)
    stored = StoredKV(server.store, served(tiny_engine()), rope=tiny_engine().engine.model.rope)
    assert read(stored, rights.begins, names=rights.namespaces).tokens == rights.begins[-1].stop


def test_what_cannot_be_moved_is_said(server, remote):
    said, ids = said_of(remote, server.store, handles_of(remote, server.store))
    (start, stop, handle), *rest = said["moved"]
    system = str(server.store.put(remote.build_pack(f"Hear this. {TEXT}", namespace="a", compiled_for="system")))
    other = server.store.get(Handle.parse(system)).token_ids
    apart = [*ids[:start], *other, *ids[stop:]]
    shifted = [[at + len(other) - stop + start, end + len(other) - stop + start, name] for at, end, name in rest]
    for wrong, prompt, status, expected in (
        (said | {"more": 1}, ids, 400, "Expected 'kp'"),
        (said, "text", 400, "token ids"),
        (said | {"moved": []}, ids, 400, "expected 1 to"),
        (said | {"moved": [[start, start, handle]]}, ids, 400, "expected 1 to"),
        (said | {"moved": [[start, len(ids), handle]]}, ids, 400, "expected 1 to"),
        (said | {"moved": [[-1, stop, handle]]}, ids, 400, "expected 1 to"),
        (said | {"moved": [[start, stop, handle]] * 2}, ids, 400, "expected 1 to"),
        (said | {"moved": [[start, stop]]}, ids, 400, "cannot be read"),
        (said | {"moved": 5}, ids, 400, "cannot be read"),
        (said | {"moved": [[start, stop, "x"]]}, ids, 404, "no pack"),
        (said | {"moved": [[start, stop, f"kp:a/{'a' * 21}"]]}, ids, 404, "no pack"),
        (said | {"moved": [[start, stop - 1, handle]]}, ids, 409, "is not"),
        (said | {"moved": [[start, start + len(other), system], *shifted]}, apart, 400, "one prefix"),
    ):
        done = server.ask("POST", "/v1/completions", {"prompt": prompt, "kp": wrong, "max_tokens": 1})
        message = done.json()["error"]["message"]
        assert (done.status_code, expected in message) == (status, True), message
    server.gate.state = replace(server.gate.state, immovable="The keys of this model cannot be moved: longrope.")
    done = server.ask("POST", "/v1/completions", {"prompt": ids, "kp": said, "max_tokens": 1})
    assert (done.status_code, "longrope" in done.json()["error"]["message"]) == (400, True)
    assert not server.seen


def wrapped(remote, width, soft=3):
    made = torch.Generator().manual_seed(3)
    header, trailer = (torch.randn(count, width, generator=made) for count in (soft, soft - 1))
    return PacketComposer(header, trailer, remote.fingerprint)


def test_packs_are_wrapped_once_from_embeddings_and_moved(server, remote, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    server.gate.state.__dict__["embeddings"] = embeddings = token_embeddings(tmp_path / "tiny")
    width = embeddings([0]).shape[1]
    composer, handles = wrapped(remote, width), handles_of(remote, server.store, compiled=False)
    options = {"view": server.store.view("a"), "composer": composer}
    plan = remote._plan("{}\n{}\n{}\nWho?".format(*handles), Request.of(options))
    said, ids = asked(plan), list(plan.prompt.token_ids)
    assert soft_of(said["soft"]).id == composer.soft.id

    def ask(kp=said, prompt=ids, key="a"):
        done = server.ask("POST", "/v1/completions", {"prompt": prompt, "kp": kp, "max_tokens": 1}, key)
        return done, "" if done.status_code == 200 else done.json()["error"]["message"]

    assert "--packets" in ask()[1]
    server.gate.state = replace(server.gate.state, packets=True)
    server.gate.state.__dict__.update(embeddings=embeddings, tokenizer=remote.tokenizer)
    other = soft_as_text(wrapped(remote, width + 1).soft)
    moved = said["moved"]
    for wrong, prompt, status, expected in (
        (said | {"soft": 5}, ids, 400, "base64"),
        (said | {"soft": "%"}, ids, 400, "cannot be read"),
        (said | {"soft": "aGVsbG8="}, ids, 400, "cannot be read"),
        (said | {"soft": other}, ids, 400, "width"),
        (said | {"moved": [[moved[0][0] + 1, *moved[0][1:]], *moved[1:]]}, ids, 409, "is not"),
        (said, [*ids[: moved[0][0]], ids[moved[0][0]] + 1, *ids[moved[0][0] + 1 :]], 409, "is not"),
    ):
        done, message = ask(wrong, prompt)
        assert (done.status_code, expected in message) == (status, True), message
    assert ask(key="reader")[0].status_code == 403
    assert not server.embedded
    for key, computed in (("a", None), ("a", "0"), ("reader", "0")):
        done, message = ask(key=key)
        assert done.status_code == 200, message
        assert computed in (None, done.headers["kp-computed-tokens"])
    assert len(server.embedded) == len(moved) == 2
    pack = server.store.get(Handle.parse(moved[0][2]))
    inner = ids[moved[0][0] + 3 : moved[0][1] - 2]
    parts = [embeddings(pack.prefix), composer.header, embeddings(inner), composer.trailer]
    assert torch.equal(server.embedded[0], torch.cat(parts))
    rights = Rights.read(server.seen[-1][1]["kv_transfer_params"], server.seen[-1][1]["cache_salt"], KEY)
    stored = StoredKV(server.store, served(tiny_engine()), rope=tiny_engine().engine.model.rope)
    packet = next(part for part in rights.begins if part.by)
    kept = server.store.read(packet.entry, ["a"])
    expected = tiny_engine().engine.model.rope.move(kept, packet.start - len(pack.prefix))
    assert read(stored, rights.begins, packet.start, packet.stop).equal(expected)


def test_embeddings_are_those_of_the_model(thin, thin_model):
    embeddings, model = token_embeddings(thin_model), thin.engine.model.network
    ids = [0, 5, 49151, 5]
    assert torch.equal(embeddings(ids), model.get_input_embeddings()(torch.tensor(ids)))


def test_models_that_make_more_of_a_token_are_refused(tmp_path):
    model_of("gemma3_text").save_pretrained(tmp_path / "scaled")
    with pytest.raises(UnsupportedRequestError, match="more of a token"):
        token_embeddings(tmp_path / "scaled")
    with pytest.raises(UnsupportedRequestError, match="cannot be read"):
        token_embeddings(tmp_path / "nowhere")
