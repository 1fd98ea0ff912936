"""`KnowledgePackStore`: LangGraph's own store as the oracle, and an agent that remembers across threads."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.tools import ToolRuntime
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.store.base import GetOp, InvalidNamespaceError, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from kp_core import ChromaFactStore, Fact, Handle, MemoryFactStore, PackStore, find_handles
from kp_core.errors import FactError, PackError
from kp_core.packs.handle import check_namespace
from kp_langchain import ChatKnowledgePacks
from kp_langchain.middleware import KnowledgePackMiddleware
from kp_langchain.store import KnowledgePackStore, PackItem, namespace_of
from tests.conftest import roomy_engine, until
from tests.kits import HashEmbedder

LABEL = st.text(st.characters(codec="utf-8", exclude_characters=".\0"), min_size=1)
NEAR = st.text("ab-_5f2dA é", min_size=1, max_size=5)  # Letters that an encoding could take for its own.
SPACE = ("memories", "ana")


@pytest.fixture
def packs(tmp_path):
    return PackStore(tmp_path / "packs")


@pytest.fixture(params=["memory", "chroma"])
def memory(request, tmp_path, packs):
    if request.param == "memory":
        yield KnowledgePackStore(roomy_engine(), packs, MemoryFactStore(HashEmbedder()), kv="lazy")
        return
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as facts:
        yield KnowledgePackStore(roomy_engine(), packs, facts, kv="lazy")


# Names


@given(st.lists(st.lists(LABEL | NEAR, min_size=1, max_size=12).map(tuple), unique=True, max_size=20))
def test_no_two_namespaces_share_a_name(found):
    names = [check_namespace(namespace_of(labels)) for labels in found]
    assert len(set(names)) == len(found)


@given(st.lists(NEAR, min_size=1, max_size=4).map(tuple))
def test_a_short_name_tells_its_labels(labels):
    """An inverse is what shows that a mapping mixes nothing."""
    name = namespace_of(labels).removeprefix("lg-")
    if not name.startswith("_h"):
        encoded = [
            re.sub(rb"_(..)", lambda byte: bytes.fromhex(byte[1].decode()), part.encode()) for part in name.split("-")
        ]
        assert tuple(part.decode() for part in encoded) == labels


def test_names_that_could_be_mixed():
    pairs = [
        (("a", "b"), ("a-b",)),
        (("a_2db",), ("a-b",)),
        (("A",), ("a",)),
        (("é",), ("e\u0301",)),
        (("x" * 61,), ("x" * 62,)),
        (("x" * 200, "y"), ("x" * 200 + "y",)),
    ]
    assert all(namespace_of(one) != namespace_of(other) for one, other in pairs)
    assert namespace_of(("users", "ana-1")) == "lg-users-ana_2d1"
    with pytest.raises(FactError, match="not Unicode"):
        namespace_of(("\ud800",))


# LangGraph's own store is the oracle

SPACES = st.sampled_from([("a",), ("a", "b"), ("a-b",), ("A",), ("a", "b", "c d"), ("x" * 70, "b")])
KEYS = st.sampled_from(["k", "K", "k/2", "", "ü\x7f"])
VALUES = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["The tide is out.", "Ana keeps bees.", "Bo has a boat.", "The mill has four sails."]),
        "n": st.integers(-2, 2),
    },
    optional={"flag": st.booleans(), "deep": st.fixed_dictionaries({"list": st.lists(st.integers(0, 1))})},
)
FILTERS = st.sampled_from(
    [
        *(None, {}, {"n": 1}, {"flag": True}, {"n": {"$ne": 0}}, {"n": {"$eq": 0}}, {"n": {"$gt": -1, "$lte": 1}}),
        *({"n": {"$gte": 1}}, {"n": {"$lt": 0}}, {"deep": {"list": [1]}}, {"missing": None}),
    ]
)
COUNTS = st.integers(0, 4)
UNINDEXED = st.sampled_from([False])
CONDITIONS = [("a",), ("*", "b"), ("b",), ("a", "*", "c d")]


def built(kind, *parts):
    """`st.builds` would draw what is left out."""
    return st.tuples(*parts).map(lambda drawn: kind(*drawn))


OPS = st.one_of(
    built(PutOp, SPACES, KEYS, VALUES | st.none()),
    # Theirs finds an item by what it said before, when it is put again without an index: so these have other keys.
    built(PutOp, SPACES, st.sampled_from(["u", "v"]), VALUES | st.none(), UNINDEXED),
    built(PutOp, SPACES, KEYS, VALUES),
    built(GetOp, SPACES, KEYS),
    built(SearchOp, SPACES | st.just(()), FILTERS, COUNTS, COUNTS, st.none() | st.sampled_from(["tide", "a boat"])),
    built(
        ListNamespacesOp,
        st.none()
        | built(lambda *of: (MatchCondition(*of),), st.sampled_from(["prefix", "suffix"]), st.sampled_from(CONDITIONS)),
        st.none() | st.integers(1, 3),
    ),
)


def distinct(op):
    """Theirs fails where two items of a batch say the same; what stands behind `|` leaves the vector as it is."""
    if not isinstance(op, PutOp) or op.value is None:
        return op
    return op._replace(value={**op.value, "text": f"{op.value['text']}|{op.namespace}{op.key}"})


def told(result):
    """What two stores have to agree on; times differ."""
    if isinstance(result, list):
        return [told(each) for each in result]
    score = getattr(result, "score", None)
    score = score if score is None else round(score, 4)
    return (
        result if result is None or isinstance(result, tuple) else (result.namespace, result.key, result.value, score)
    )


@pytest.mark.parametrize("kind", ["memory", pytest.param("chroma", marks=pytest.mark.slow)])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches=st.lists(st.lists(OPS, max_size=6), max_size=4))
def test_it_does_what_langgraphs_own_store_does(kind, batches, tmp_path_factory):
    embedder, folder = HashEmbedder(), tmp_path_factory.mktemp("oracle")
    facts = MemoryFactStore(embedder) if kind == "memory" else ChromaFactStore(folder / "facts", embedder)
    ours = KnowledgePackStore(roomy_engine(), PackStore(folder / "packs"), facts, fields=["text"], kv="lazy")
    embed = lambda texts: [row.tolist() for row in embedder.embed(texts)]  # noqa: E731
    oracle = InMemoryStore(index={"dims": embedder.dimensions, "embed": embed, "fields": ["text"]})
    living = {}
    for drawn in batches:
        batch = [distinct(op) for op in drawn]
        whole = [
            told(oracle.batch([op._replace(limit=99, offset=0)])[0]) if isinstance(op, SearchOp) else None
            for op in batch
        ]
        ours_said, theirs_said = told(ours.batch(batch)), told(oracle.batch(batch))
        for op, all_found, mine, theirs in zip(batch, whole, ours_said, theirs_said, strict=True):
            if isinstance(op, ListNamespacesOp):
                # Theirs lists namespaces that were emptied, or only looked at, too.
                full = {space[: op.max_depth] for space, keys in living.items() if keys}
                assert mine == [each for each in theirs if each in full and each in mine]
                if op.max_depth is None:
                    assert mine == [each for each in theirs if each in full]
            elif isinstance(op, SearchOp):
                # The order of equal scores, and of namespaces without a question, is each store's own.
                # Theirs gives items without a score again on every page, so its page is cut from the whole.
                page = all_found[op.offset : op.offset + op.limit]
                assert [score for *_, score in mine] == [score for *_, score in page]
                assert all(each in all_found for each in mine)
                assert len({each[:2] for each in mine}) == len(mine)
            else:
                assert mine == theirs
        for op in batch:
            if isinstance(op, PutOp):
                keys = living.setdefault(op.namespace, set())
                (keys.discard if op.value is None else keys.add)(op.key)
    for space, keys in living.items():
        assert {item.key for item in ours.search(space, limit=99) if item.namespace == space} == keys
    # A pack lives as long as its item, and no longer.
    held = {namespace_of(space) for space, keys in living.items() if keys}
    assert {handle.namespace for handle in ours._packs} == held


@pytest.mark.parametrize("query", [None, "tide"])
def test_pages_of_a_search_make_up_the_whole(memory, query):
    for number in range(12):
        memory.put(("a", str(number % 3)), f"k{number}", {"text": f"Item {number}"})
    whole = memory.search(("a",), query=query, limit=99)
    pages = [item for at in range(0, 12, 5) for item in memory.search(("a",), query=query, limit=5, offset=at)]
    assert len(whole) == 12
    assert pages == whole
    assert [item.score for item in whole] == sorted((item.score for item in whole), key=lambda score: -(score or 0))


def test_each_item_is_on_one_page(memory):
    for key in "decba":
        memory.put(SPACE, key, {"text": "The same."})
        memory.put(SPACE, f"{key} unsearched", {"text": "Unsearched."}, index=False)
    pages = [memory.search(SPACE, query="same", limit=2, offset=at) for at in range(0, 14, 2)]
    assert [len(page) for page in pages] == [2, 2, 2, 2, 2, 0, 0]
    assert len({item.key for page in pages for item in page}) == 10


# What is ours


def test_an_item_comes_with_its_handle(memory, packs):
    memory.put(SPACE, "bees", {"text": "Ana keeps bees."})
    item = memory.get(SPACE, "bees")
    assert isinstance(item, PackItem)
    [(_, stop, handle)] = find_handles(item.handle)
    assert (stop, handle.namespace) == (len(item.handle), namespace_of(SPACE))
    assert packs.get(handle).text == "Ana keeps bees."
    assert item.content == item.dict()["handle"] == item.handle
    assert memory.search(SPACE, query="bees")[0].handle == item.handle
    # Times and values go with the item, and text that is gone takes its pack along.
    memory.put(SPACE, "bees", {"text": "Ana keeps goats.", "since": 1999})
    again = memory.get(SPACE, "bees")
    assert (again.created_at, again.value) == (item.created_at, {"text": "Ana keeps goats.", "since": 1999})
    assert again.updated_at > item.updated_at
    assert handle not in packs
    memory.delete(SPACE, "bees")
    assert (memory.get(SPACE, "bees"), list(packs)) == (None, [])


@pytest.mark.parametrize(
    ("value", "index", "text"),
    [
        ({"memory": "Ana keeps bees."}, None, "Ana keeps bees."),
        ({"memory": "Ana keeps bees.", "n": 1}, None, '{"memory": "Ana keeps bees.", "n": 1}'),
        ({"memory": "Ana keeps bees.", "n": 1}, ["memory"], "Ana keeps bees."),
        ({"a": {"b": ["Ana", "Bo"]}}, ["a.b[*]"], "Ana\nBo"),
        ({"n": 1}, None, '{"n": 1}'),
        ({"blank": "  "}, None, '{"blank": "  "}'),
    ],
)
def test_what_of_an_item_is_its_text(memory, packs, value, index, text):
    memory.put(SPACE, "k", value, index)
    item = memory.get(SPACE, "k")
    assert packs.get(Handle.parse(item.handle)).text == text
    assert item.value == value


def test_the_same_text_twice_is_one_pack_until_both_are_gone(memory, packs):
    for key in "ab":
        memory.put(SPACE, key, {"text": "Ana keeps bees."})
    memory.delete(SPACE, "a")
    assert len(list(packs)) == 1
    assert memory.search(SPACE, query="bees")[0].handle == str(next(iter(packs)))
    memory.delete(SPACE, "b")
    assert not list(packs)


def test_one_key_in_two_namespaces_at_once(memory):
    spaces = [("memories", "ana"), ("memories", "bo")]
    for text in ("A boat.", "Two boats."):
        memory.batch([PutOp(space, "k", {"text": f"{space[1]}: {text}"}) for space in spaces])
        assert [memory.get(space, "k").value["text"] for space in spaces] == [f"ana: {text}", f"bo: {text}"]
        assert len(memory.search(("memories",), query="boats")) == 2


async def test_asynchronously_and_across_restarts(tmp_path, packs):
    folder, embedder = tmp_path / "facts", HashEmbedder()
    for start in (0, 1):
        with ChromaFactStore(folder, embedder) as facts:
            memory = KnowledgePackStore(roomy_engine(), packs, facts)
            if not start:
                await memory.aput(("x" * 99, "b"), "k", {"text": "Ana keeps bees."})
            assert (await memory.aget(("x" * 99, "b"), "k")).value == {"text": "Ana keeps bees."}
            assert [item.key for item in await memory.asearch((), query="bees")] == ["k"]
            assert await memory.alist_namespaces() == [("x" * 99, "b")]


def test_what_expires_is_not_given_and_lives_on_when_it_is_read(packs):
    facts = MemoryFactStore(HashEmbedder())
    memory = KnowledgePackStore(roomy_engine(), packs, facts, ttl={"default_ttl": 60, "refresh_on_read": True})
    memory.put(SPACE, "long", {"text": "Ana keeps bees."})
    memory.put(SPACE, "ever", {"text": "Bo has a boat."}, ttl=None)
    memory.put(SPACE, "short", {"text": "The tide is out."}, ttl=0.002)
    [first] = facts.facts(where={"kp:digest": Fact("Ana keeps bees.").digest})
    assert memory.get(SPACE, "long", refresh_ttl=False)
    [same] = facts.facts(ids=[first.id])
    assert memory.search(SPACE, query="bees", limit=1, filter={"text": "Ana keeps bees."})
    [later] = facts.facts(ids=[first.id])
    assert first.expires == same.expires < later.expires
    until(lambda: memory.get(SPACE, "short", refresh_ttl=False) is None)
    assert {item.key for item in memory.search(SPACE)} == {"long", "ever"}
    assert len(list(packs)) == 3
    assert memory.sweep_ttl() == 1
    assert len(list(packs)) == 2


def test_a_read_renews_no_item_that_has_changed_meanwhile(memory):
    for key in ("same", "changed", "gone"):
        memory.put(SPACE, key, {"text": f"Old {key}."}, ttl=60)
    read = list(memory._facts.facts())
    memory.put(SPACE, "changed", {"text": "New."}, ttl=60)
    memory.delete(SPACE, "gone")
    embedded = memory._facts.embedder.embedded
    memory._items([(fact, None) for fact in read], refresh=True)
    assert memory._facts.embedder.embedded == embedded
    assert [item.value["text"] for item in memory.search(SPACE)] == ["Old same.", "New."]
    assert next(memory._facts.facts()).expires > read[0].expires


def test_an_expired_item_leaves_nothing(memory, packs):
    def put(text):
        memory.put(SPACE, "k", {"text": text}, ttl=1e-6)

    def held():
        return [packs.get(handle).text for handle in packs], [fact.text for fact in memory._facts.stored()]

    put("The old number.")
    put("The new number.")
    assert held() == (["The new number."],) * 2
    memory.delete(SPACE, "k")
    assert held() == ([], [])
    put("Another number.")
    assert (memory.sweep_ttl(), held()) == (1, ([], []))
    put("A number.")
    memory._facts.purge(namespace_of(SPACE))  # No row is left that names the namespace.
    assert (memory.sweep_ttl(), held()) == (1, ([], []))


def test_what_others_put_there_is_passed_over(memory):
    memory.put(SPACE, "k", {"text": "Ana keeps bees."})
    memory._facts.add([Fact("Bees sting.", namespace=namespace_of(SPACE)), Fact("Bees fly.")])
    assert [item.key for item in memory.search((), query="bees")] == ["k"]
    assert len(memory.search(())) == 1
    assert memory.list_namespaces() == [SPACE]


def test_packs_of_other_stores_are_not_swept(memory, packs):
    other = packs.put(roomy_engine().build_pack("Bees fly.", provenance={"unit": "fact"}, lazy=True))
    assert memory.sweep_ttl() == 0
    assert other in packs


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(memory, packs):
    for value, kind, said in (
        ({"at": object()}, FactError, "JSON cannot say"),
        ({"n": float("nan")}, FactError, "JSON cannot say"),
        ({"text": "\ud800"}, FactError, "no file can hold"),
        ({"text": "word " * 9000}, PackError, "Cut it into several"),
    ):
        with pytest.raises(kind, match=said):
            memory.put(SPACE, "k", value)
    with pytest.raises(FactError, match="minutes above 0"):
        memory.put(SPACE, "k", {"text": "a"}, ttl=0)
    with pytest.raises(FactError, match="not Unicode"):
        memory.get(SPACE, "\ud800")
    with pytest.raises(InvalidNamespaceError):
        memory.batch([PutOp(("a.b",), "k", {"text": "a"})])
    memory.put(SPACE, "here", {"text": "a b c"})
    with pytest.raises(FactError, match="expected one of"):
        memory.search(SPACE, filter={"n": {"$near": 1}})
    assert [handle.namespace for handle in packs] == [namespace_of(SPACE)]
    assert [item.key for item in memory.search(())] == ["here"]


# An agent


class Calls(AgentMiddleware):
    """Has the model call one tool per turn, and then answer; notes what was sent."""

    def __init__(self):
        self.usage = []

    def wrap_model_call(self, request, handler):
        asked = isinstance(request.messages[-1], HumanMessage)
        response = handler(request.override(tool_choice="any" if asked else "none"))
        self.usage.append(response.result[0].response_metadata["kp"])
        return response


def test_an_agent_remembers_across_threads_at_constant_prompt_length(chat_engine, call_tokens, packs):
    memory = KnowledgePackStore(chat_engine, packs, MemoryFactStore(HashEmbedder()))
    told = [f"Ana said on day {day} that she saw {day * 7} boats in the harbour." for day in range(1, 5)]

    @tool
    def remember(runtime: ToolRuntime) -> str:
        """Keep what the user said."""
        runtime.store.put(("memories", "ana"), str(len(told)), {"text": told.pop(0)})
        return "Done."

    @tool
    def recall(runtime: ToolRuntime) -> str:
        """What the user said before."""
        return "\n".join(item.content for item in runtime.store.search(("memories", "ana"), query="boats", limit=99))

    model = ChatKnowledgePacks(
        engine=chat_engine,
        store=packs,
        namespaces=[namespace_of(("memories", "ana"))],
        max_tokens=min(call_tokens, 100),
    )

    def ask(tools, text):
        calls = Calls()
        agent = create_agent(model, tools, middleware=[KnowledgePackMiddleware(), calls], store=memory)
        return agent.invoke({"messages": [HumanMessage(text)]}), calls.usage

    ask([remember], "I saw boats.")
    sent, delivered = [], []
    for more in (0, 3):
        for day in range(more):
            memory.put(("memories", "ana"), f"later {day}", {"text": told.pop(0)})
        state, usage = ask([recall], "How many boats did I see?")  # a thread of its own
        [message] = [each for each in state["messages"] if isinstance(each, ToolMessage)]
        assert state["packs"] == message.content.split("\n")
        assert len(state["packs"]) == 1 + more
        sent.append(usage[-1]["prompt_tokens"])
        delivered.append(usage[-1]["pack_tokens"])
    assert sent[1] - sent[0] <= 3  # The line feeds between packs.
    assert delivered[1] > 3.5 * delivered[0] > 0
    # The packs of Ana are no packs for whoever may not read her namespace.
    stranger = model.model_copy(update={"namespaces": [namespace_of(("memories", "bo"))]})
    calls = Calls()
    agent = create_agent(stranger, [recall], middleware=[KnowledgePackMiddleware(), calls], store=memory)
    agent.invoke({"messages": [HumanMessage("How many boats did I see?")]})
    assert calls.usage[-1]["pack_tokens"] == 0
