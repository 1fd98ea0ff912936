"""What was computed behind other packs is kept, read again after a restart, and read by nobody else."""

import threading
import time

import pytest
import torch

from kp_core import load_engine
from kp_core.errors import OptionError
from kp_core.packs.entry import Entry
from kp_core.packs.handle import Handle
from kp_core.packs.pack import common_length
from kp_core.packs.store import PackStore
from kp_core.packs.view import Packs
from tests.core.packs.made import FINGERPRINT, Watched, make_pack
from tests.kits import NaiveComposer, tiny_model, tiny_tokenizer

TEXTS = [
    "The lamp of Veyl burns kelp oil, and its keeper counts ships.",
    "The bell of Tarn was cast in 1811 from a sunken cannon.",
    "The ferry to Ostra leaves when the fog lifts, never before.",
]
QUESTION = "\n\nWhich of them was cast?"


def fresh_engine(chunk_tokens=128, dtype=torch.bfloat16):
    """An engine as a new process has it: with nothing in its tree."""
    model = tiny_model("llama", dtype)
    return load_engine(model, tokenizer=tiny_tokenizer(merges=7), chunk_tokens=chunk_tokens, cache_bytes=50_000_000)


@pytest.fixture
def stored(tmp_path):
    engine, store = fresh_engine(), PackStore(tmp_path)
    handles = [str(store.put(engine.build_pack(text, namespace="veyl"))) for text in TEXTS]
    return engine, store, handles


def ask(engine, store, message, *namespaces, **options):
    return engine.prefill(message, view=store.view(*(namespaces or ("veyl",))), **options)


def computed_of_packs(found):
    """Tokens of packs that were computed: all that was computed but what stands outside packs."""
    return found.usage.computed_tokens - found.usage.prompt_tokens


@pytest.mark.parametrize("placement", ["in_place", "system"])
def test_a_combination_survives_a_restart_bit_for_bit(stored, placement):
    engine, store, handles = stored
    message = "\n\n".join(handles) + QUESTION
    first = ask(engine, store, message, keep="always", placement=placement)
    assert first.usage.computed_tokens > first.usage.prompt_tokens, "the second and third pack were computed"
    again = fresh_engine()
    explained = again.explain(message, view=store.view("veyl"), placement=placement)
    found = ask(again, PackStore(store.path), message, placement=placement)
    assert computed_of_packs(found) <= 0
    assert explained.counts["kept"] >= 100
    oracle = ask(fresh_engine(), store, message, placement=placement, reuse=False)
    assert torch.equal(found.logits, oracle.logits)
    assert torch.equal(first.logits, oracle.logits)


class InMemory(Packs):
    """The packs of a store, beside KV that is kept in memory."""

    def __init__(self, store, *, keeps):
        self.store, self.keeps, self.kept = store, keeps, {}

    def peek(self, handle, key=None):
        return self.store.peek(handle, key)

    def get(self, handle, key=None):
        return self.store.get(handle, key)

    def has(self, entry, namespaces):
        may_read = entry.key in self.kept and entry.namespaces <= {*namespaces}
        return may_read and common_length(self.kept[entry.key][0], entry.token_ids)

    def read(self, entry, namespaces):
        if not self.has(entry, namespaces):
            return None
        token_ids, kv = self.kept[entry.key]
        return kv.slice(0, common_length(token_ids, entry.token_ids))

    def write(self, entry, kv, compression="lossless"):
        self.kept[entry.key] = entry.token_ids, kv
        return True


def test_a_store_of_ones_own_may_keep(stored):
    engine, store, handles = stored
    message, own = "\n\n".join(handles) + QUESTION, InMemory(store, keeps=True)
    first = ask(engine, own, message, keep="always")
    found = ask(fresh_engine(), own, message)
    assert own.kept
    assert computed_of_packs(found) <= 0
    assert torch.equal(found.logits, first.logits)
    mute = InMemory(store, keeps=False)
    ask(fresh_engine(), mute, message, keep="always")
    assert not mute.kept


def test_a_plan_says_what_will_be_read(tmp_path):
    engine, store = fresh_engine(), PackStore(tmp_path)
    handles = [str(store.put(engine.build_pack(text, namespace="veyl"))) for text in (TEXTS[0], "It rang.")]
    message = "\n\n".join(handles) + QUESTION
    ask(engine, store, message, keep="always")
    again = fresh_engine()
    told = again.explain(message, view=store.view("veyl")).counts
    assert told["kept"] > 0
    assert told["computed"] == ask(again, store, message).usage.computed_tokens


def in_memory(engine, token_ids, kv, at):
    """Whether the tree or an idle buffer holds these tokens; `kv` is that of position `at`."""
    local, text = engine.engine, f",{','.join(map(str, token_ids))},"
    prompts = [
        "," + "".join(f"{token}," for node in [*leaf.line][::-1] for token in node.ids)
        for leaf in (*local.tree._age, *local.tree._cold)
    ]
    idle = [buffer.layers[0].memory[0][0, :, at : at + len(token_ids)] for buffer in local.pool._waiting]
    return any(text in prompt for prompt in prompts) or any(torch.equal(keys, kv.keys[0]) for keys in idle)


@pytest.mark.parametrize("host_bytes", [0, 10**8])
def test_a_pack_that_another_process_removes_leaves_the_memory(stored, host_bytes):
    engine, store, handles = stored
    engine.engine.tree.host_bytes = host_bytes
    packs = [store.get(Handle.parse(handle)) for handle in handles]

    def held(pack):
        return in_memory(engine, pack.token_ids, pack.kv, len(pack.prefix))

    asked = "\n\n".join(handles[:2]) + QUESTION
    for message in (asked, handles[2] + QUESTION):
        ask(engine, store, message, keep="never")
    assert all(map(held, packs))
    if host_bytes:
        engine.engine.tree.vacate()
    late = engine.stream(asked, view=store.view("veyl"), max_tokens=2)  # Planned now, and computed later.
    PackStore(store.path).remove(Handle.parse(handles[0]))
    ask(engine, store, "Who rang?")
    assert [held(pack) for pack in packs] == [False, False, True]
    assert ask(engine, store, handles[2] + QUESTION).usage.computed_tokens == 0, "the others stay"
    assert next(late.deltas())
    assert held(packs[0])
    ask(engine, store, "Who rang?")
    assert held(packs[0]), "it is in use"
    late.result()
    ask(engine, store, "Who rang?")
    assert [held(pack) for pack in packs] == [False, False, True]


def test_another_question_behind_the_same_packs_reads_them(stored):
    engine, store, handles = stored
    ask(engine, store, "\n\n".join(handles) + QUESTION, keep="always")
    other = "\n\n".join(handles[:2]) + " So it was cast, they say, and when?"
    found = ask(fresh_engine(), store, other)
    assert computed_of_packs(found) <= 0
    assert torch.equal(found.logits, ask(fresh_engine(), store, other, reuse=False).logits)


def test_by_default_it_is_kept_when_it_is_met_twice(stored):
    engine, store, handles = stored
    message = "\n\n".join(handles) + QUESTION
    engine.explain(message, view=store.view("veyl"))  # Plans alone meet nothing.
    for times in (1, 2, 3):
        ask(engine, store, message)
        engine.when_idle(lambda: None).result()
        assert len(list(store.kept())) == (0 if times == 1 else 3), "the second and the third pack, and the question"
    assert computed_of_packs(ask(fresh_engine(), store, message)) <= 0


def test_what_was_met_as_text_is_kept_the_first_time_as_packs(stored):
    """As a retriever sends documents: as text until their packs are compiled."""
    engine, store, handles = stored
    ask(engine, store, "\n\n".join(TEXTS) + QUESTION)
    message = "\n\n".join(handles) + QUESTION
    assert ask(engine, store, message).usage.computed_tokens == 0
    engine.when_idle(lambda: None).result()
    found = ask(fresh_engine(), PackStore(store.path), message)
    assert computed_of_packs(found) <= 0


def test_never_keeps_nothing_and_reads_nothing(stored):
    engine, store, handles = stored
    message = "\n\n".join(handles) + QUESTION
    for _ in range(3):
        ask(engine, store, message, keep="never")
    engine.when_idle(lambda: None).result()
    assert list(store.kept()) == []
    ask(engine, store, message, keep="always")
    assert computed_of_packs(ask(fresh_engine(), store, message, keep="never")) > 0


def test_an_agent_of_ten_searches_computes_no_knowledge_after_a_restart(tmp_path):
    """Each search brings a pack, behind the words of the conversation and the answers of the model."""
    store = PackStore(tmp_path)
    engine = fresh_engine()
    handles = [str(store.put(engine.build_pack(f"Note {at}: {TEXTS[at % 3]}", namespace="veyl"))) for at in range(10)]
    view = store.view("veyl")
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What burns?"}]
    for handle in handles:
        answer = engine.generate(messages, view=view, keep="always", max_tokens=4)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": handle}]
    engine.generate(messages, view=view, keep="always", max_tokens=4)
    messages += [{"role": "user", "content": "And now?"}]
    found = ask(fresh_engine(), PackStore(tmp_path), messages, keep="always")
    assert found.usage.pack_tokens > 500
    assert found.usage.reused_tokens >= found.usage.pack_tokens
    assert computed_of_packs(found) <= 0
    assert torch.equal(found.logits, ask(fresh_engine(), store, messages, reuse=False).logits)


def test_only_a_view_of_all_that_stands_before_reads_it(tmp_path):
    engine, store = fresh_engine(), PackStore(tmp_path)
    ours = str(store.put(engine.build_pack(TEXTS[0], namespace="ours")))
    words = f"{TEXTS[1]} {TEXTS[2]}"
    theirs = str(store.put(engine.build_pack(words, namespace="theirs")))
    message = f"{theirs}\n\n{ours}{QUESTION}"
    ask(engine, store, message, "ours", "theirs", keep="always")
    ((entry, _),) = store.kept()
    assert entry.namespaces == {"ours", "theirs"}
    assert computed_of_packs(ask(fresh_engine(), store, message, "ours", "theirs")) <= 0
    # The same tokens, one of the packs as text: the KV is there, and not for this view.
    text = f"{words}\n\n{ours}{QUESTION}"
    found = ask(fresh_engine(), store, text, "ours")
    assert found.prompt.token_ids == ask(fresh_engine(), store, message, "ours", "theirs").prompt.token_ids
    assert found.usage.reused_tokens == 0


def test_words_of_a_conversation_stay_in_its_namespace(stored):
    engine, store, _ = stored
    pack = store.put(engine.build_pack(" ".join(TEXTS[:2]), namespace="veyl"))
    message = f"My secret is 17. {pack}{QUESTION}"
    with pytest.raises(OptionError, match="keep_in='elsewhere'"):
        ask(engine, store, message, keep_in="elsewhere")
    ask(engine, store, message, "veyl", "mine", keep="always")
    assert list(store.kept()) == [], "nobody said which namespace is that of the conversation"
    ask(engine, store, message, "veyl", "mine", keep="always", keep_in="mine")
    assert [entry.namespaces for entry, _ in store.kept()] == [{"veyl", "mine"}] * 2, "the pack, and the question"
    for namespaces, is_read in [(("veyl",), False), (("veyl", "mine"), True)]:
        options = {"keep_in": "mine"} if is_read else {}
        assert (computed_of_packs(ask(fresh_engine(), store, message, *namespaces, **options)) <= 0) == is_read
    assert store.forget("mine") == 2
    assert list(store.kept()) == []


GONE = {
    "the conversation": lambda store, _: store.forget("mine"),
    "the namespace of the pack": lambda store, _: store.forget("veyl"),
    "the conversation, elsewhere": lambda store, _: PackStore(store.path).forget("mine"),
    "the pack": lambda store, pack: store.remove(pack),
    "the pack, put again and forgotten": lambda store, pack: (
        (again := store.get(pack)) and store.remove(pack),
        store.put(again),
        store.forget("mine"),
    ),
    "nothing": lambda store, _: store.forget("another"),
}


@pytest.mark.parametrize("gone", GONE)
def test_kv_that_waits_to_be_kept_is_not_written_once_its_namespace_is_forgotten(stored, gone):
    engine, store, _ = stored
    pack = store.put(engine.build_pack(" ".join(TEXTS[:2]), namespace="veyl"))
    message, go_on = f"My secret is 17. {pack}{QUESTION}", threading.Event()
    options = {"keep": "used_twice", "keep_in": "mine"}
    ask(engine, store, message, "veyl", "mine", **options)
    engine.when_idle(lambda: go_on.wait(60) and None)
    ask(engine, store, message, "veyl", "mine", **options)  # It is met again, and waits to be kept.
    GONE[gone](store, pack)
    go_on.set()
    engine.when_idle(lambda: None).result(60)
    assert len(list(store.kept())) == (2 if gone == "nothing" else 0)
    if gone == "the conversation":  # A later request is not affected.
        time.sleep(0.02)
        ask(engine, store, message, "veyl", "mine", keep="always", keep_in="mine")
        assert len(list(store.kept())) == 2


def test_a_namespace_that_is_forgotten_while_an_entry_is_written_keeps_nothing(tmp_path):
    for step in range(10):
        blobs, other = Watched(tmp_path / str(step)), PackStore(tmp_path / str(step))
        store = PackStore(blobs)
        entry = Entry(FINGERPRINT, 1, "", tuple(range(10)), frozenset({str(store.put(make_pack("one"))), "mine"}))
        begun = len(blobs.done)

        def before(number, at=begun + step, other=other):
            if number == at:
                other.forget("mine")

        blobs.before = before
        is_kept = store.write(entry, make_pack("one", tokens=10).kv)
        if len(blobs.done) > begun + step:
            # Behind its last look at the mark it was kept, and is deleted by whoever forgets.
            assert list(store.kept()) == [], f"forgotten before operation {step}"
        elif is_kept:
            break
    assert is_kept
    assert step > 4


def test_what_stands_behind_a_pack_is_deleted_with_it(stored):
    engine, store, handles = stored
    ask(engine, store, "\n\n".join(handles) + QUESTION, keep="always")
    ask(engine, store, "\n\n".join(handles[1:]) + QUESTION, keep="always")
    assert len(list(store.kept())) == 5, "three packs behind others, and two questions"
    (first,) = [handle for handle in store if str(handle) == handles[0]]
    store.remove(first)
    assert [{*map(str, entry.handles)} for entry, _ in store.kept()] == [set(handles[1:])] * 2


def test_a_removed_pack_keeps_nothing_behind_it(stored):
    engine, store, handles = stored
    key = Entry(engine.fingerprint, 3, "0" * 32, (1, 2), frozenset({handles[0]}))
    kv = engine.build_pack(TEXTS[0]).kv.slice(0, 2)
    assert store.write(key, kv)
    assert store.read(key, ("veyl",)).equal(kv)
    assert store.read(key, ("other",)) is None
    (first,) = [handle for handle in store if str(handle) == handles[0]]
    store.remove(first)
    assert not store.write(key, kv)
    assert list(store.kept()) == []


def test_steered_and_composed_prompts_share_nothing_with_plain_ones(stored):
    engine, store, handles = stored

    message = "\n\n".join(handles) + QUESTION
    plain = ask(engine, store, message, keep="always")
    composed = ask(fresh_engine(), store, message, composer=NaiveComposer(), keep="always")
    assert composed.usage.approximate_tokens > 0
    assert not torch.equal(plain.logits, composed.logits)
    assert torch.equal(ask(fresh_engine(), store, message).logits, plain.logits)
