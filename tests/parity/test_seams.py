"""An engine, a composer and a store of one's own, each in a few lines, behind both adapters."""

from dataclasses import dataclass, replace

import pytest
from langchain_core.caches import InMemoryCache
from pydantic import ValidationError

from kp_core import Composer, Handle, ModelFingerprint, Packs, PackStore, Session, TokenStream
from kp_core.errors import ModelError, OptionError, PackError, UnsupportedRequestError
from kp_langchain import ChatKnowledgePacks
from kp_llamaindex import KnowledgePackLLM
from tests.conftest import tiny_engine
from tests.kits import NaiveComposer, tiny_tokenizer

FACTS = ("The mill of Veyl has four sails.", "The coin of Orrelay is a ninth.")
ADAPTERS = {"langchain": ChatKnowledgePacks, "llamaindex": KnowledgePackLLM}

either = pytest.mark.parametrize("adapter", ADAPTERS)


class FixedEngine:
    """An engine that always gives the same answer."""

    answer, max_positions = "Forty-two.", 512

    def __init__(self, supports=(), like=None):
        self.supports, self.lacks = frozenset(supports), {}
        self.tokenizer = like.tokenizer if like else tiny_tokenizer()
        self.identity = like.fingerprint if like else replace(ModelFingerprint.unknown(), weights="fixed")
        self.plans = []

    def run(self, plan):
        self.plans.append(plan)

        def tokens(stream):
            stream.computed_tokens = len(plan.prompt)
            yield from self.tokenizer.encode(self.answer)[: plan.token_budget]

        return TokenStream(tokens)

    def kv(self, plans):
        raise NotImplementedError


@dataclass(frozen=True)
class LastComposer(Composer):
    """Moves all packs of a prompt."""

    key: str = "last"

    def layout(self, prompt, moved, host):
        return prompt, moved

    def fill(self, region, packs, room, move):
        assert [pack.token_ids for pack in packs] == [span.pack.token_ids for span in region.spans]
        return super().fill(region, packs, room, move)


class ListStore(Packs):
    """Packs in memory."""

    def __init__(self):
        self.packs = {}

    def handle(self, text, namespace):
        return PackStore.handle(self.names, text, namespace)

    def peek(self, handle, key=None):
        return self.packs.get(str(handle))

    def get(self, handle, key=None):
        return self.packs[str(handle)]

    def put(self, pack):
        handle = self.handle(pack.text, pack.namespace)
        self.packs[str(handle)] = pack
        return handle

    def remove(self, handle):
        del self.packs[str(handle)]

    def __iter__(self):
        return map(Handle.parse, self.packs)


@pytest.fixture(params=["folder", "list"])
def store(request, tmp_path):
    if request.param == "folder":
        return PackStore(tmp_path)
    store = ListStore()
    store.names = PackStore(tmp_path)
    return store


def ask(adapter, asked, fields, **options):
    """The answer's text and its usage."""
    if adapter == "langchain":
        answer = ChatKnowledgePacks(**fields).invoke(asked, **options)
        return answer.text, answer.response_metadata["kp"]
    answer = KnowledgePackLLM(**fields).complete(asked, **options)
    return answer.text, answer.raw["kp"]


@either
def test_an_engine_of_six_members_answers(adapter):
    text, usage = ask(adapter, "How many?", {"engine": FixedEngine()})
    assert text == FixedEngine.answer
    assert usage["computed_tokens"] == usage["prompt_tokens"] > 0
    assert ask(adapter, "How many?", {"engine": Session(FixedEngine(), name="fixed")}, max_tokens=2)[0] == "Fo"
    assert ADAPTERS[adapter](engine=FixedEngine()).model_name == "FixedEngine"
    with pytest.raises(ModelError, match="Got a int as engine"):
        ADAPTERS[adapter](engine=3)


@either
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "any"}, "tools"),
        ({"response_schema": True}, "response schemas"),
        ({"temperature": 1.0}, "sampled answers"),
    ],
    ids=["tools", "schema", "sampling"],
)
def test_what_an_engine_lacks_is_refused_with_what_has_it(adapter, options, what):
    with pytest.raises(UnsupportedRequestError, match=rf"FixedEngine does not offer .*{what}.*load_engine\(model\)"):
        ask(adapter, "Hi", {"engine": FixedEngine()}, **options)


@either
def test_an_engine_without_steering(adapter):
    engine = FixedEngine(like=tiny_engine())
    steering = tiny_engine().make_steering([("an 7 er", "er 42")], progress=False)
    for fields, options in (({"steering": steering}, {}), ({}, {"steering": steering})):
        with pytest.raises(UnsupportedRequestError, match="does not offer steering"):
            ask(adapter, "Hi", {"engine": engine, **fields}, **options)


def composed(engine, store, **numerics):
    """A question behind two packs, of which the second does not stand where it was compiled."""
    packs = engine.build_packs(FACTS, namespace="open", progress=False)
    packs = (replace(pack, fingerprint=replace(pack.fingerprint, **numerics)) for pack in packs)
    handles = "\n".join(str(store.put(pack)) for pack in packs)
    return {"engine": engine, "store": store, "namespaces": ["open"], "max_tokens": 4}, f"{handles}\n\nWho?"


@either
@pytest.mark.parametrize("make", [NaiveComposer, LastComposer])
def test_a_composer_as_a_field_and_per_call(adapter, make, store):
    fields, asked = composed(tiny_engine(), store)
    composer = make()
    tiny_engine().clear_cache()
    exact, plain = ask(adapter, asked, fields)
    expected = tiny_engine().generate(asked, view=store.view("open"), max_tokens=4, composer=composer)
    assert plain["approximate_tokens"] == 0 < expected.usage.approximate_tokens
    for given, options in (({"composer": composer}, {}), ({}, {"composer": composer})):
        tiny_engine().clear_cache()
        text, usage = ask(adapter, asked, {**fields, **given}, **options)
        assert text == expected.text
        assert usage["approximate_tokens"] == expected.usage.approximate_tokens
        assert usage["prompt_tokens"] == plain["prompt_tokens"]
    assert ask(adapter, asked, {**fields, "composer": composer}, composer=None)[0] == exact


@either
def test_packs_of_the_same_model_in_other_numerics(adapter, store):
    other = tiny_engine()
    fields, asked = composed(other, store, dtype="float16")
    with pytest.raises(PackError, match="dtype: pack has float16"):
        ask(adapter, asked, fields)
    with pytest.raises(OptionError, match=r"gone in 0\.3; 'rebuild' computes"):
        ask(adapter, asked, {**fields, "mismatch": "accept"})
    assert ask(adapter, asked, {**fields, "mismatch": "rebuild"})[1]["approximate_tokens"] == 0


@either
def test_a_store_may_be_a_path_or_anything_that_acts_as_one(adapter, tmp_path):
    made = ADAPTERS[adapter](store=str(tmp_path / "packs"), namespaces=["open"])
    assert isinstance(made.store, PackStore)
    with pytest.raises(ValidationError, match="Got a dict as store; expected a `kp_core"):
        ADAPTERS[adapter](store={}, namespaces=["open"])


def test_a_cached_answer_is_that_of_its_composer(store):
    fields, asked = composed(tiny_engine(), store)
    cache = InMemoryCache()
    answers = [
        ChatKnowledgePacks(cache=cache, **fields, composer=each).invoke(asked) for each in (None, NaiveComposer())
    ]
    kp = [answer.response_metadata["kp"]["approximate_tokens"] for answer in answers]
    assert kp[0] == 0 < kp[1]
    plain = ChatKnowledgePacks(cache=cache, **fields)
    strings = [plain._get_llm_string(composer=each) for each in (LastComposer(), LastComposer(), LastComposer("other"))]
    assert strings[0] == strings[1] != strings[2]


def test_a_restored_llm_does_not_lose_its_composer_unseen(store):
    fields, _ = composed(tiny_engine(), store)
    data = KnowledgePackLLM(**fields, composer=NaiveComposer()).to_dict()
    assert data["composer"] == "given"
    given = {"engine": tiny_engine(), "store": store}
    with pytest.raises(ValidationError, match="expected that composer"):
        KnowledgePackLLM.from_dict(data, **given)
    assert KnowledgePackLLM.from_dict(data, **given, composer=NaiveComposer()).composer == NaiveComposer()
    if isinstance(store, ListStore):
        with pytest.raises(ValidationError, match="expected that store"):
            KnowledgePackLLM.from_dict(data, engine=tiny_engine(), composer=None)
