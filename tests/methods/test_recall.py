"""What left a conversation is found without reading all that left."""

import pytest

from kp_core import Fact, MemoryFactStore, PackStore, SentenceTransformerEmbedder, events, load_engine
from kp_methods import recall
from tests.kits import HashEmbedder, tiny_model, tiny_tokenizer


class Noted(PackStore):
    """A store that notes what is looked up."""

    def peek(self, handle, key=None):
        self.noted.append(handle)
        return super().peek(handle, key)


def test_a_text_is_read_once_and_of_many_handles_the_last_count(tmp_path, monkeypatch):
    engine, store = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()), Noted(tmp_path)
    facts = MemoryFactStore(HashEmbedder())
    texts = [f"Page {number}: the harbour had {7 * number} boats." for number in range(30)]
    facts.add([Fact(text, namespace="book") for text in texts])
    handles = [store.put(engine.build_pack(text, namespace="book", lazy=True)) for text in texts]
    looked_up = []
    for _ in range(2):
        store.noted = []
        [*_, best] = recall.recalled(texts[3], handles, facts, engine, store.view("book"), room=1000)
        assert best.pack.text == texts[3]
        looked_up.append(len(set(store.noted)))
    assert looked_up == [30, 20], "all of them, then those that are near"
    monkeypatch.setattr(recall, "_MET", 5)
    found = recall.recalled(texts[3], handles, facts, engine, store.view("book"), room=1000)
    assert {pack.pack.text for pack in found} < {*texts[-5:]}


def test_packs_of_no_fact_are_not_found_and_that_is_said(tmp_path, caplog):
    engine, store = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()), PackStore(tmp_path)
    facts = MemoryFactStore(HashEmbedder())
    facts.add([Fact("The mill has four sails.", namespace="book")])
    handles = [store.put(engine.build_pack("The ferry leaves at dawn.", namespace="book", lazy=True))]
    events.warn_once.cache_clear()
    for _ in range(2):
        assert recall.recalled("When does the ferry leave?", handles, facts, engine, store.view("book"), room=99) == []
    [record] = caplog.records
    assert "none of them is of a fact in `facts`" in record.message
    handles.append(store.put(engine.build_pack("The mill has four sails.", namespace="book", lazy=True)))
    [found] = recall.recalled("When does the ferry leave?", handles, facts, engine, store.view("book"), room=99)
    assert found.pack.text == "The mill has four sails."
    [_] = caplog.records


@pytest.mark.slow
def test_a_question_about_nothing_that_was_met_finds_nothing(smol, tmp_path):
    store, facts = PackStore(tmp_path), MemoryFactStore(SentenceTransformerEmbedder())
    said = {
        "Who runs the bakery?": "The bakery of Tarn is run by Pim Oster. Its loaf has juniper berries.",
        "When does the ferry leave?": "The ferry across the lake leaves Tarn at 7:40 and costs three silver marks.",
        "How many beds does the hospital have?": "The hospital of Tarn has 46 beds. Its chief surgeon is Ines Karrow.",
    }
    facts.add([Fact(text, namespace="book") for text in said.values()])
    handles = [store.put(pack) for pack in smol.build_packs(said.values(), namespace="book", progress=False)]

    def found(question):
        packs = recall.recalled(question, handles, facts, smol, store.view("book"), room=1000)
        return [pack.pack.text for pack in packs]

    for question, text in said.items():
        assert text in found(question)
    for question in (
        "What is the capital of France?",
        "Which instrument does the mayor play?",
        "How deep is the mine?",
    ):
        assert found(question) == []
