"""The engine over llama.cpp: packs, conversations, several users, restarts, and what it refuses."""

import copy
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kp_core import PackStore, load_engine
from kp_core.engines.llama import context as context_module
from kp_core.errors import (
    CacheBudgetError,
    ContextOverflowError,
    FingerprintMismatchError,
    MissingDependencyError,
    ModelError,
    OptionError,
    UnsupportedRequestError,
)
from kp_core.testing import check_engine
from tests.llama.conftest import load

ROOT = Path(__file__).parents[2]
TEXTS = [
    f"Note {at}. Keeper {at * 7} of the light counted {at * 31 + 2} ships in {1800 + at}.\n" * 3 for at in range(4)
]
QUESTION = "How many ships did the keeper count?"


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


def test_eight_users_get_the_answers_that_each_gets_alone(llama, store):
    """They share the cells of one pack, and decode in one pass."""
    handle = store.put(llama.build_pack(TEXTS[1]))
    view = store.view("default")
    asked = {at: f"{handle}\nWhat did keeper {at} do?" for at in range(8)}
    alone = {at: llama.generate(one, view=view, max_tokens=12).token_ids for at, one in asked.items()}
    llama.clear_cache()
    together = dict(llama.generate_many(asked, view=view, max_tokens=12, progress=False))
    # Batches round in another way (logits differ by a hundredth), which changes some answers after the first token.
    assert sum(together[at].token_ids[0] == alone[at][0] for at in asked) >= 7
    assert len({answer.token_ids for answer in together.values()}) > 1
    context = llama.engine.model.context
    llama.clear_cache()
    assert context.call(context.used_cells, llama.bytes_per_token) == 0
    assert len(context.free_ids) == context_module.MOST_SEQUENCES


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


def test_what_is_asked_for_beside_others_does_not_wait_for_cells(llama):
    """Requests that do not fit beside one another wait, and all are answered."""
    small = load(cells=512)
    asked = {at: f"Tell me a long story about the number {at}." for at in range(6)}
    answers = dict(small.generate_many(asked, max_tokens=150, progress=False))
    assert len(answers) == 6
    with pytest.raises((CacheBudgetError, ContextOverflowError), match=r"512|tokens"):
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


@pytest.mark.parametrize("composer", ["naive", "splice"])
def test_composers_are_refused_by_name(llama, store, composer):
    handles = [store.put(llama.build_pack(text)) for text in TEXTS[:2]]
    with pytest.raises(UnsupportedRequestError, match="behind all others") as error:
        llama.generate("\n".join(map(str, handles)), view=store.view("default"), composer=composer)
    assert composer in str(error.value)


def test_packs_of_two_engines_never_mix(llama, store, smol_bf16):
    handle = store.put(smol_bf16.build_pack(TEXTS[0]))
    asked = {"messages": f"{handle}\n{QUESTION}", "view": store.view("default")}
    with pytest.raises(FingerprintMismatchError):
        llama.generate(**asked)
    assert not llama.fingerprint.same_model(smol_bf16.fingerprint)
    with pytest.raises(FingerprintMismatchError):
        llama.generate(**asked, mismatch="accept")
    rebuilt = llama.prefill(**asked, mismatch="rebuild")
    assert torch.equal(rebuilt.logits.argmax(), llama.prefill(f"{TEXTS[0]}\n{QUESTION}").logits.argmax())


def step(*arguments):
    command = [sys.executable, "-m", "tests.llama.test_engine", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)  # noqa: S603
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_packs_and_what_was_kept_behind_them_are_read_after_a_restart(tmp_path):
    before, after = step(tmp_path / "store"), step(tmp_path / "store")
    assert before["pack_tokens"] == after["pack_tokens"] > 100
    assert after["computed_tokens"] <= after["prompt_tokens"], "all KV of packs came from the store"
    assert before["text"] == after["text"]
    assert after["fingerprint"] == before["fingerprint"]


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


def test_an_option_that_does_not_exist():
    with pytest.raises(OptionError, match="cells"):
        load(cell=5)


def test_another_release_of_the_library(monkeypatch):
    monkeypatch.setattr(context_module, "BUILDS", ("0.0.1",))
    with pytest.raises(MissingDependencyError, match=r"0\.3\.36 is installed; expected 0\.0\.1"):
        load()


def test_a_tokenizer_with_other_ids(smol_bf16):
    other = copy.deepcopy(smol_bf16.tokenizer)
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


def main(folder):
    """One process: packs are built if they are not stored, and asked about."""
    engine, store = load(), PackStore(Path(folder))
    handles = [str(store.put(engine.build_pack(text))) for text in TEXTS[:3]]
    engine.clear_cache()
    message = "\n".join(handles) + f"\n{QUESTION}"
    answer = engine.generate(message, view=store.view("default"), keep="always", max_tokens=6)
    print(json.dumps({**answer.usage.to_dict(), "text": answer.text, "fingerprint": engine.fingerprint.id}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
