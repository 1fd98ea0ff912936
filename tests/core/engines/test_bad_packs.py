"""Packs and checkpoints that are damaged or foreign: the right answer, or an error of ours."""

import os
import pickle
from collections import deque
from dataclasses import replace
from functools import partial

import pytest
import torch

from kp_core import ChatTemplate, Fact, PackStore, load_engine
from kp_core.banks.compiling import compile_facts
from kp_core.errors import ContextOverflowError, ModelError, PackCorruptError, PromptError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.entry import EntryFile
from kp_core.plan.request import Request
from tests.conftest import tiny_engine
from tests.kits import tiny_model, tiny_tokenizer

TEXT = "The gate of the harbour is green and old."


class ReadOnly(FolderBlobs):
    """A mount, or a bucket, that may only be read; root may write to any folder here."""

    def write(self, *_, **__):
        raise PermissionError("read-only")

    def delete(self, *_):
        raise PermissionError("read-only")


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path / "packs")


@pytest.mark.parametrize("damage", ["tensors", "all", "absent"])
def test_a_damaged_pack_of_a_read_only_store_is_computed_from_its_text(damage, store, caplog):
    engine = tiny_engine()
    handle = store.put(engine.build_pack(TEXT, namespace="a"))
    asked = {"messages": f"{handle}\n\nWho?", "max_tokens": 4, "reuse": False}
    expected = engine.generate(**asked, view=store.view("a"))
    [file] = store.path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    if damage == "all":
        data[40] ^= 1
    file.write_bytes(data) if damage != "absent" else file.unlink()
    held = PackStore(ReadOnly(store.path))
    assert held.get(handle).is_lazy
    assert engine.generate(**(asked | {"reuse": True}), view=held.view("a")).token_ids == expected.token_ids
    assert ("is damaged, stays as it is, and is computed from its text" in caplog.text) == (damage != "absent")
    assert sorted(each.name for each in store.path.rglob("*") if each.is_file()) == sorted(
        each.name for each in held.path.rglob("*") if each.is_file()
    )
    if damage == "all":
        next(store.path.rglob("*.txt")).write_text("other")
        with pytest.raises(PackCorruptError, match="Store it anew"):
            held.get(handle)


@pytest.mark.parametrize("compress", ["none", "lossless"])
@pytest.mark.parametrize("damage", ["none", "first layer", "last layer", "cut", "cut while read"])
def test_what_is_read_into_a_request_is_checked_before_it_is_used(damage, compress, store, monkeypatch, caplog):
    engine = tiny_engine()
    handle = store.put(engine.build_pack(TEXT, namespace="a", compress=compress))
    asked = {"messages": f"{handle}\n\nWho?", "view": store.view("a"), "max_tokens": 3, "logprobs": True}
    expected = engine.generate(**asked, reuse=False)
    [file] = store.path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    if "layer" in damage:
        data[-1 if damage == "last layer" else 8 + int.from_bytes(data[:8], "little")] ^= 1
    file.write_bytes(data[:-5] if damage == "cut" else data)
    read = EntryFile.read_into
    if damage == "cut while read":
        monkeypatch.setattr(EntryFile, "read_into", lambda *_: (os.truncate(file, len(data) - 5), read(*_))[1])
    if damage == "none":
        monkeypatch.setattr(PackStore, "get", None)  # Nothing else reads it.
    engine.clear_cache()
    found = engine.generate(**asked)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert ("is damaged, deleted, and computed again" in caplog.text) == (damage != "none") != file.exists()
    assert found.usage.reused_tokens >= found.usage.pack_tokens or damage != "none"


@pytest.mark.parametrize("damage", [False, True])
def test_a_head_is_read_into_a_request_whose_first_tokens_are_in_memory(damage, store, monkeypatch, caplog):
    engine, said = tiny_engine(), [{"role": "system", "content": f"{TEXT} " * 12}, {"role": "user", "content": "Who?"}]
    asked = {"messages": said, "view": store.view("a"), "max_tokens": 3, "logprobs": True}
    expected = engine.generate(**asked, reuse=False)
    engine.generate(**asked, keep="always")
    said[1]["content"] = "Which colour?"
    again = engine.generate(**asked, reuse=False)
    [*_, file] = sorted(store.path.rglob("behind/*/*.safetensors"), key=lambda path: path.stat().st_size)
    if damage:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    engine.clear_cache()
    engine.prefill([{"role": "system", "content": f"{TEXT[:9]}"}, said[1]])
    before = engine.cached_bytes
    monkeypatch.setattr(PackStore, "read", lambda *_: None)
    found = engine.generate(**asked)
    assert (found.token_ids, found.logprobs) == (again.token_ids, again.logprobs)
    assert (found.usage.computed_tokens < 30) != damage
    assert ("is damaged, deleted, and computed again" in caplog.text) == damage
    assert file.exists() != damage
    assert before < engine.cached_bytes
    said[1]["content"] = "Who?"
    once_more = engine.generate(**asked)
    assert (once_more.token_ids, once_more.logprobs) == (expected.token_ids, expected.logprobs)
    assert once_more.usage.computed_tokens < 30  # The tree has what was read, and its own first tokens.


def test_the_tree_gets_a_pack_that_was_read_into_a_request_behind_its_first_token(store):
    engine = tiny_engine()
    handle, other = (store.put(engine.build_pack(text, namespace="a")) for text in (TEXT, "Red."))
    local, view = engine.engine, store.view("a")
    plan = engine._plan(f"{handle}\n\nWho?", Request.of({"view": view, "max_tokens": 3}))
    engine.clear_cache()
    tokens = local.run(plan)
    answer = [next(tokens)]
    assert str(handle) not in local.tree.packs
    answer += tokens
    assert local.cached_tokens(plan) == len(plan.prompt)
    local.pool.clear()  # What comes next is the tree's.
    again = engine.generate(f"{handle}\n\nWho?", view=view, max_tokens=3, logprobs=True)
    assert (tuple(answer), again.usage.computed_tokens) == (again.token_ids, 0)
    assert (
        again.logprobs
        == engine.generate(f"{handle}\n\nWho?", view=view, logprobs=True, max_tokens=3, reuse=False).logprobs
    )
    # A pack that is removed meanwhile leaves the memory all the same.
    engine.clear_cache()
    tokens = local.run(engine._plan(f"{other}\n\nWho?", Request.of({"view": view, "max_tokens": 3})))
    next(tokens)
    store.remove(other)
    for _ in range(2):
        engine.generate("Who rang?", view=view, max_tokens=1)
        deque(tokens, maxlen=0)
    assert str(other) not in local.tree.packs


def cut(kv):
    yield KVTensors(kv.keys[:1], kv.values[:1])
    yield KVTensors((*kv.keys, kv.keys[0]), (*kv.values, kv.values[0]))
    yield KVTensors([key[:1] for key in kv.keys], [value[:1] for value in kv.values])
    yield KVTensors([key[..., :4] for key in kv.keys], kv.values)


@pytest.mark.slow
def test_a_bit_that_flips_anywhere_in_an_entry_changes_no_answer(store, caplog):
    """Every position, one bit each; 64 bytes at most, of padding, may change unnoticed."""
    engine = tiny_engine()
    handle = store.put(engine.build_pack("Green.", namespace="a"))
    [file] = store.path.rglob("*.safetensors")
    intact = file.read_bytes()

    def answer():
        engine.clear_cache()
        return engine.generate(f"{handle}\n\nWho?", max_tokens=1, view=store.view("a"), logprobs=True)

    expected, unnoticed = answer(), 0
    for at in range(len(intact)):
        file.write_bytes(intact[:at] + bytes([intact[at] ^ 1 << at % 8]) + intact[at + 1 :])
        caplog.clear()
        found = answer()
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs), at
        is_noticed = "and computed again from its text" in caplog.text or "cannot be read" in caplog.text
        assert (found.usage.reused_tokens < expected.usage.reused_tokens) == is_noticed
        unnoticed += not is_noticed
    assert unnoticed <= 64


@pytest.mark.parametrize("number", range(4))
def test_a_pack_with_other_layers_than_the_model_is_computed_from_its_text(number, store, caplog):
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=16)
    pack = engine.build_pack(TEXT, namespace="a")
    expected = engine.generate(f"{TEXT}\n\nWho?", max_tokens=4)
    wrong = replace(pack, kv=list(cut(pack.kv))[number])
    handle = store.put(wrong)
    engine.clear_cache()
    answer = engine.generate(f"{handle}\n\nWho?", view=store.view("a"), max_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert "other layers or states than the model" in caplog.text


@pytest.mark.parametrize("text", ["", " \n", "\ud800", "\0"])
def test_a_pack_of_nothing_or_of_no_text(text, store):
    engine = tiny_engine()
    pack = replace(engine.build_pack(TEXT), text=text, kv=None)
    for ids in ((), (999999,) * 3, (-1,), pack.token_ids):
        asked = partial(engine.generate, "Hi", packs=[replace(pack, token_ids=ids)], max_tokens=2)
        if text == "\ud800":
            with pytest.raises(PromptError, match="Unicode"):
                asked()
        else:
            assert asked().usage.completion_tokens > 0
    if text != "\ud800":
        handle = store.put(pack)
        assert engine.generate(f"{handle} Hi", view=store.view("default"), max_tokens=1).usage.completion_tokens == 1


class _Runs:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (os.mkdir, (str(self.file),))


@pytest.mark.parametrize("kind", ["code", "junk", "pickle", "empty"])
def test_pickled_weights_run_nothing_and_are_refused_by_name(kind, tmp_path):
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    weights, made = folder / "pytorch_model.bin", tmp_path / "made"
    if kind == "code":
        torch.save({"a": _Runs(made)}, weights)
    else:
        weights.write_bytes({"junk": b"junk" * 100, "pickle": pickle.dumps(_Runs(made)), "empty": b""}[kind])
    with pytest.raises(ModelError, match="Could not load"):
        load_engine(str(folder))
    assert not made.exists()


def test_a_text_longer_than_the_context_is_refused_before_anything_is_computed(store, monkeypatch, caplog):
    engine = tiny_engine()
    long = "gate " * 3000
    monkeypatch.setattr(engine.engine, "kv", lambda plans: [pytest.fail("computed") for _ in plans])
    with pytest.raises(ContextOverflowError, match="2048 positions"):
        engine.build_pack(long)
    monkeypatch.undo()
    # Those beside it are compiled.
    made = compile_facts([Fact(long), Fact(TEXT)], engine, store, progress=False)
    assert [handle is None for handle in made] == [True, False]
    assert "2048 positions" in caplog.text
    ChatTemplate(tiny_tokenizer()).tokenise_pack(long)
