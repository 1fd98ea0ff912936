"""The engine over llama.cpp: packs, conversations, several users, restarts, and what it refuses."""

import copy
import itertools
import random
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from kp_core import PackStore, Question, load_engine
from kp_core.engines.shared import shared_engine
from kp_core.errors import (
    ContextOverflowError,
    MissingDependencyError,
    ModelError,
    OptionError,
    PackError,
    UnsupportedRequestError,
)
from kp_core.packs.handle import Handle
from kp_core.session.deciding import ballots_of
from kp_llama import context as context_module
from tests.ggufs import write_recurrent, write_windowed
from tests.kits import NaiveComposer, check_engine
from tests.llama import process as processes
from tests.llama.conftest import load, process
from tests.llama.process import QUESTION, TEXTS


def near(one, other):
    """Whether logits differ by what llama.cpp rounds between passes of other lengths."""
    return bool((one - other).norm() <= 0.05 * other.norm())


@pytest.fixture
def store(llama, tmp_path):
    llama.clear_cache()
    return PackStore(tmp_path / "store")


def test_the_conformance_kit_of_engines(llama):
    check_engine(llama)


def test_a_pack_gives_the_bits_of_the_same_passes_of_llama_cpp(llama, store):
    """The oracle is llama.cpp alone, which computes the template, the text and the question one after the other."""
    pack = llama.build_pack(TEXTS[0])
    handle = store.put(pack)
    llama.clear_cache()
    found = llama.prefill(f"{handle}\n{QUESTION}", view=store.view("default"))
    assert found.usage.pack_tokens == len(pack.token_ids) > 50
    assert found.usage.computed_tokens == found.usage.prompt_tokens
    context, ids, start = llama.engine.model.context, found.prompt.token_ids, len(pack.prefix)
    llama.clear_cache()
    cuts = [0, start, start + len(pack.token_ids), len(ids)]
    for begin, end in itertools.pairwise(cuts):
        logits = context.call(context.decode, [(0, begin, ids[begin:end])])
    context.call(context.remove, 0)
    assert torch.equal(found.logits, torch.from_numpy(logits[0]))


def test_a_pack_answers_as_its_text_but_for_rounding(llama, store):
    """The text is computed in one pass, which llama.cpp rounds in another way."""
    handle = store.put(llama.build_pack(TEXTS[0]))
    found = llama.prefill(f"{handle}\n{QUESTION}", view=store.view("default"))
    oracle = load().prefill(f"{TEXTS[0]}\n{QUESTION}")
    assert found.prompt.token_ids == oracle.prompt.token_ids
    assert near(found.logits, oracle.logits)
    assert not near(found.logits, llama.prefill(QUESTION).logits)


def test_kv_from_the_tree_is_kv_that_lay_in_the_context(llama, store):
    handle = store.put(llama.build_pack(TEXTS[0]))
    asked = {"messages": f"{handle}\n{QUESTION}", "view": store.view("default")}
    llama.prefill(**asked)
    logits = []
    for number in range(2):
        if number:
            llama.engine.pool.clear()
        logits.append(llama.prefill(f"{handle}\nHow old is the keeper?", view=store.view("default")).logits)
    llama.clear_cache()
    again = llama.prefill(f"{handle}\nHow old is the keeper?", view=store.view("default"))
    assert torch.equal(*logits)
    assert near(again.logits, logits[0])


def recorded(context, monkeypatch):
    """The calls that change the cells of a context from now on, with the logits of each pass."""
    calls = []

    def wrap(name):
        plain = getattr(context, name)

        def call(*arguments):
            before = len(calls)
            result = plain(*arguments)
            del calls[before:]  # What a call did through others counts once.
            calls.append((name, arguments, result))
            return result

        monkeypatch.setattr(context, name, call)

    for name in ("decode", "copy", "remove", "restore", "state"):
        wrap(name)
    return calls


def test_users_at_once_get_the_bits_of_the_same_passes_in_a_fresh_context(llama, store, monkeypatch):
    """They share the cells of one pack, and decode in one pass. Nothing but the passes decides about the logits."""
    handle = store.put(llama.build_pack(TEXTS[1]))
    view = store.view("default")
    asked = {at: f"{handle}\nWhat did keeper {at} do?" for at in range(8)}
    llama.clear_cache()
    context = llama.engine.model.context
    calls = recorded(context, monkeypatch)
    together = dict(llama.generate_many(asked, view=view, max_tokens=12, progress=False))
    llama.clear_cache()
    assert len({answer.token_ids for answer in together.values()}) > 1
    assert context.call(context.used_cells, llama.bytes_per_token) == 0
    assert len(context.free_ids) == context_module.MOST_SEQUENCES
    fresh = load().engine.model.context
    passes = []
    for name, arguments, result in calls:
        again = fresh.call(getattr(fresh, name), *arguments)
        if name == "decode":
            assert np.array_equal(again, result)
            passes.append(len(result))
    assert max(passes) == 8
    for at, answer in together.items():  # Alone in one pass, each token is the likeliest but for rounding.
        ids = [*answer.prompt.token_ids, *answer.token_ids]
        assert str(at) in llama.tokenizer.decode(answer.prompt.token_ids[-20:])
        logits = fresh.call(fresh.decode, [(0, 0, ids[:-1])], "all")[len(answer.prompt) - 1 :]
        fresh.call(fresh.remove, 0)
        chosen = logits[range(len(answer.token_ids)), answer.token_ids]
        assert (logits.max(axis=1) - chosen).max() < 0.5


def test_decisions_behind_a_pack_are_those_of_plain_strings_but_for_rounding(llama, store):
    handle, view = store.put(llama.build_pack(TEXTS[1])), store.view("default")
    questions = {
        "words": Question("Does this text name a keeper?"),
        "letters": Question("What was counted?", ["the ships at sea", "the stars"]),
    }
    llama.clear_cache()
    together = llama.decide(str(handle), questions, view=view, rotations="all")
    assert together.usage.pack_tokens == 4 * len(store.get(handle).token_ids)
    assert together.usage.computed_tokens < together.usage.prompt_tokens
    for name, question in questions.items():
        answer = together.answers[name]
        asked = [*ballots_of({0: question}, "all", llama.tokenizer)]
        logits = [llama.prefill(f"{TEXTS[1]}\n\n{ballot.text}", reuse=False).logits for ballot in asked]
        plain = question.decided([ballot.shares(row) for ballot, row in zip(asked, logits, strict=True)])
        assert answer.probabilities == pytest.approx(plain.probabilities, abs=0.03)
        assert plain.probabilities[answer.label] > plain.confidence - 0.06
        assert sum(answer.probabilities.values()) == pytest.approx(1)
    llama.clear_cache()
    context = llama.engine.model.context
    assert context.call(context.used_cells, llama.bytes_per_token) == 0


def test_states_that_do_not_fit_are_not_decided(tiny_gguf):
    small = load_engine(tiny_gguf, engine="llama", cells=512)
    with pytest.raises(ContextOverflowError):
        small.decide("word " * 600, {0: Question("Is it?")})
    assert small.decide("word", {0: Question("Is it?"), 1: Question("Is it so?")}).answers.keys() == {0, 1}


def test_users_of_one_pack_share_its_cells(llama, store):
    handle = store.put(llama.build_pack(TEXTS[2]))
    llama.clear_cache()
    context, view = llama.engine.model.context, store.view("default")
    streams = [llama.stream(f"{handle}\nWho is keeper {at}?", view=view, max_tokens=4) for at in range(6)]
    used = []
    for stream in streams:
        next(stream)
        used.append(context.call(context.used_cells, llama.bytes_per_token))
    assert used[0] > 90
    assert max(after - before for before, after in itertools.pairwise(used)) < 30
    for stream in streams:
        stream.close()


def test_a_conversation_goes_on_from_what_was_said(llama):
    llama.clear_cache()
    messages = [{"role": "user", "content": QUESTION}]
    first = llama.generate(messages, max_tokens=8)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    second = llama.generate(messages, max_tokens=4)
    assert second.usage.reused_tokens >= len(first.prompt) - 3
    assert second.usage.computed_tokens < 30


def test_what_is_asked_for_beside_others_does_not_wait_for_cells(tiny_gguf):
    """Requests that do not fit beside one another wait, and all are answered."""
    small = load_engine(tiny_gguf, engine="llama", cells=512)
    asked = {at: f"Tell me a long story about the number {at}." for at in range(6)}
    answers = dict(small.generate_many(asked, max_tokens=150, progress=False))
    assert len(answers) == 6
    with pytest.raises((ModelError, ContextOverflowError), match=r"512|tokens"):
        small.generate("word " * 600)
    assert small.generate("Name a colour.", max_tokens=2).token_ids


def test_streams_that_are_left_early_free_their_cells(llama):
    llama.clear_cache()
    for _ in range(40):
        stream = llama.stream(QUESTION, max_tokens=8)
        next(stream)
        del stream
    assert llama.generate(QUESTION, max_tokens=2).token_ids
    llama.clear_cache()
    assert len(llama.engine.model.context.free_ids) == context_module.MOST_SEQUENCES


def test_steered_values(llama):
    steering = llama.make_steering([("I am glad.", "I am sad."), ("What joy!", "What grief!")], progress=False)
    plain = llama.prefill("How are you?").logits
    steered = llama.prefill("How are you?", steering=(steering, 8.0), scope="prompt").logits
    assert not torch.equal(plain, steered)
    assert torch.equal(llama.prefill("How are you?", reuse=False).logits.argmax(), plain.argmax())


@pytest.mark.parametrize("composer", [NaiveComposer(), "splice"])
def test_composers_are_refused_by_name(llama, store, composer):
    handles = [store.put(llama.build_pack(text)) for text in TEXTS[:2]]
    with pytest.raises(UnsupportedRequestError, match="behind all others") as error:
        llama.generate("\n".join(map(str, handles)), view=store.view("default"), composer=composer)
    assert (composer if composer == "splice" else composer.key) in str(error.value)


def test_packs_of_two_engines_never_mix(tiny_gguf, tmp_path):
    """Not even of one file."""
    one, other = load_engine(tiny_gguf, engine="llama", cells=512), load_engine(tiny_gguf, engine="hf", dtype="float32")
    assert not one.fingerprint.same_model(other.fingerprint)
    store = PackStore(tmp_path / "store")
    view = store.view("default")
    for maker, reader in ((one, other), (other, one)):
        handle = store.put(maker.build_pack(f"{TEXTS[0]} It was kept by {maker.fingerprint.engine}."))
        asked = {"messages": f"{handle}\n{QUESTION}", "view": view}
        with pytest.raises(PackError):
            reader.generate(**asked)
        rebuilt = reader.prefill(**asked, mismatch="rebuild")
        text = reader.prefill(f"{store.get(handle).text}\n{QUESTION}", reuse=False)
        assert near(rebuilt.logits, text.logits)
        assert reader.prefill(**asked, mismatch="rebuild").usage.pack_tokens > 0
    both = store.put(one.build_pack(TEXTS[1]))
    assert store.put(other.build_pack(TEXTS[1])) == both, "one text has one handle, and an entry for each engine"
    for engine in (one, other):
        engine.clear_cache()
        used = engine.prefill(f"{both}\n{QUESTION}", view=view).usage
        assert used.computed_tokens == used.prompt_tokens


def test_packs_and_what_was_kept_behind_them_are_read_after_a_restart(tiny_gguf, tmp_path):
    found = []
    for _ in range(2):
        with process(processes.answer, tiny_gguf, tmp_path / "store") as (_, answers):
            found.append(answers.recv())
    before, after = found
    assert before["pack_tokens"] == after["pack_tokens"] > 100
    assert after["computed_tokens"] <= after["prompt_tokens"], "all KV of packs came from the store"
    assert before["text"] == after["text"]
    assert after["fingerprint"] == before["fingerprint"]


def test_a_killed_process_loses_no_pack_that_it_stored(tiny_gguf, tmp_path):
    draw, stored = random.Random(0), dict[int, str]()
    for _ in range(6):
        with process(processes.build, tiny_gguf, tmp_path / "store", len(stored)) as (builder, packs):
            for _ in range(draw.randint(1, 5)):
                stored.update([packs.recv()])
            packs.poll(draw.uniform(0, 0.02))  # Somewhere in the work on the next one.
            builder.kill()
            with suppress(EOFError):
                while True:
                    stored.update([packs.recv()])
    engine, store = load_engine(tiny_gguf, engine="llama", cells=512), PackStore(tmp_path / "store")
    assert len(stored) >= 6
    for number, handle in stored.items():
        expected = engine.build_pack(f"Ship {number} came in at night.")
        assert store.get(Handle.parse(handle)).kv.equal(expected.kv)
        engine.clear_cache()
        used = engine.prefill(f"{handle}\nWhen?", view=store.view("default")).usage
        assert used.pack_tokens == len(expected.token_ids)
        assert used.computed_tokens == used.prompt_tokens
    assert [*store.verify()] == []


def test_a_file_that_is_no_model(tmp_path, gguf):
    (empty := tmp_path / "empty.gguf").write_bytes(b"")
    (text := tmp_path / "text.gguf").write_text("hello", encoding="utf-8")
    whole = gguf.read_bytes()
    (cut := tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (other := tmp_path / "other.gguf").write_bytes(
        whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama", 1)
    )
    for path in (empty, text, cut, other, tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="GGUF"):
            load_engine(str(path), engine="llama")


@pytest.mark.parametrize("dtype", ["q8_0", "int8", torch.int8])
def test_a_cache_that_cannot_be_cut(dtype):
    with pytest.raises(ModelError, match="float16"):
        load(dtype=dtype)


@pytest.mark.parametrize("name", ["cells", "chunk_tokens"])
@pytest.mark.parametrize("value", [-1, 0, 8, 1 << 40, "many", 2.5])
def test_sizes_that_llama_cpp_cannot_take(tiny_gguf, name, value):
    """Some of them end the process there."""
    with pytest.raises(OptionError, match=rf"{name}=.*expected a whole number from 64"):
        load_engine(tiny_gguf, engine="llama", **{name: value})


def test_a_context_beyond_the_memory(tiny_gguf):
    with pytest.raises(ModelError, match="KV of 2,000,000,000 tokens takes about 512 GB"):
        load_engine(tiny_gguf, engine="llama", cells=2_000_000_000)


def test_the_smallest_context(tiny_gguf):
    small = load_engine(tiny_gguf, engine="llama", cells=64, chunk_tokens=4096)
    large = load_engine(tiny_gguf, engine="llama", cells=2048, chunk_tokens=64)
    question = "Who was here? " * 8
    assert len(large.prefill(question).prompt) > 64
    assert near(large.prefill(question).logits, small.prefill(question).logits)


@pytest.mark.parametrize(
    ("write", "said"), [(write_windowed, "sliding windows"), (write_recurrent, "recurrent layers")]
)
def test_a_model_whose_state_cannot_be_cut(tmp_path, write, said):
    with pytest.raises(ModelError, match=rf"other.gguf has {said}.*engine='hf'"):
        load_engine(str(write(tmp_path / "other.gguf")), engine="llama")


def test_llama_cpp_is_the_default_for_a_file_that_it_can_run(tiny_gguf, tmp_path, caplog):
    assert shared_engine(tiny_gguf).fingerprint.engine == "llama.cpp"
    assert load_engine(Path(tiny_gguf), dtype="float32", device=None, cells=512).fingerprint.dtype == "float32"
    for settings in ({"engine": "hf"}, {"device": "cpu"}, {"dtype": "auto"}):
        assert load_engine(tiny_gguf, **settings).fingerprint.engine == "local"
    assert not [record for record in caplog.records if record.name.startswith("kp_core")]
    windowed = load_engine(str(write_windowed(tmp_path / "windowed.gguf")))
    assert windowed.fingerprint.engine == "local"
    assert "sliding windows" in caplog.text


def test_an_option_that_does_not_exist():
    with pytest.raises(OptionError, match="cells"):
        load(cell=5)


def test_another_release_of_the_library(monkeypatch):
    monkeypatch.setattr(context_module, "BUILDS", ("0.0.1",))
    with pytest.raises(MissingDependencyError, match=r"0\.3\.36 is installed; expected 0\.0\.1"):
        load()


def test_a_tokenizer_with_other_ids(llama):
    other = copy.deepcopy(llama.tokenizer)
    other.add_tokens(["<|extra|>"])
    with pytest.raises(ModelError, match="tokens"):
        load(tokenizer=other)


def test_a_failure_inside_a_batch_leaves_nothing_behind(llama):
    """An id beyond the vocabulary makes llama.cpp refuse a whole batch."""
    llama.clear_cache()
    plain = llama.prefill(QUESTION).logits
    context = llama.engine.model.context
    used = context.call(context.used_cells, llama.bytes_per_token)
    one, other = context.free_ids[:2]
    with pytest.raises(ModelError, match="failed to compute 3 tokens"):
        context.call(context.decode, [(one, 0, [5, 6]), (other, 0, [context.vocabulary + 1])])
    assert context.call(context.used_cells, llama.bytes_per_token) == used
    llama.clear_cache()
    assert torch.equal(llama.prefill(QUESTION).logits, plain)


def test_threads_that_build_ask_and_clear_at_once(llama, store):
    view, errors = store.view("default"), []
    handles = [store.put(llama.build_pack(text)) for text in TEXTS]
    expected = [llama.generate(f"{handle}\n{QUESTION}", view=view, max_tokens=3).token_ids[0] for handle in handles]

    def work(number):
        try:
            for turn in range(6):
                at = (number + turn) % len(handles)
                answer = llama.generate(f"{handles[at]}\n{QUESTION}", view=view, max_tokens=3)
                assert answer.token_ids[0] == expected[at]
                if turn == 3:
                    llama.clear_cache()
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
