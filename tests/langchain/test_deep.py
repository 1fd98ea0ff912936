"""deepagents' released package with our store behind its files, and the profile that it finds by entry point."""

from importlib.metadata import entry_points

import pytest
from langchain.agents import AgentState
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import ToolNode

from kp_core import Handle, MemoryFactStore, PackStore, find_handles
from kp_core.errors import OptionError
from kp_langchain import ChatKnowledgePacks
from kp_langchain.store import KnowledgePackStore, namespace_of
from tests.conftest import roomy_engine
from tests.kits.stores import HashEmbedder

deepagents = pytest.importorskip("deepagents")

from deepagents.backends import StoreBackend  # noqa: E402
from deepagents.middleware.filesystem import FilesystemMiddleware  # noqa: E402

from kp_langchain import deep  # noqa: E402

SPACE = ("files", "ana")
TEXT = "".join(f"Line {n}: the harbour of Veyl has {7 * n} boats.\n" for n in range(1, 31))


@pytest.fixture
def packs(tmp_path):
    return PackStore(tmp_path / "packs")


@pytest.fixture
def memory(packs):
    return KnowledgePackStore(roomy_engine(), packs, MemoryFactStore(HashEmbedder()), fields=["pack"], kv="lazy")


@pytest.fixture
def files(memory):
    return deep.PackBackend(memory, namespace=lambda _: SPACE)


def content(result):
    assert result.error is None
    return result.file_data["content"]


def test_a_long_file_is_read_as_a_handle(files, packs):
    files.write("/log.txt", TEXT)
    files.write("/note.txt", "Orla Venn keeps the lighthouse.\n")
    handle = content(files.read("/log.txt"))
    assert packs.get(Handle.parse(handle)).text + "\n" == TEXT
    assert content(files.read("/log.txt", 3, 2)) == "".join(TEXT.splitlines(keepends=True)[3:5])
    assert content(files.read("/note.txt")) == "Orla Venn keeps the lighthouse.\n"
    assert files.read("/absent.txt").error
    # What else the backend does is done with the text.
    assert [each["path"] for each in files.ls("/").entries] == ["/log.txt", "/note.txt"]
    assert [match["line"] for match in files.grep("Line 7:").matches] == [7]
    assert files.download_files(["/log.txt"])[0].content == TEXT.encode()
    files.edit("/log.txt", "Line 7:", "Line seven:")
    edited = content(files.read("/log.txt"))
    assert edited != handle
    assert packs.get(Handle.parse(edited)).text + "\n" == TEXT.replace("Line 7:", "Line seven:")
    assert files.delete("/log.txt").error is None
    assert packs.peek(Handle.parse(edited)) is None


async def test_as_it_is_read_without_blocking(files):
    await files.awrite("/log.txt", TEXT)
    assert content(await files.aread("/log.txt")) == content(files.read("/log.txt")) != TEXT


def test_what_cannot_be_a_pack_is_a_file_all_the_same(files):
    """Longer than half of the model's window, or binary."""
    long = "x y " * roomy_engine().max_positions
    files.write("/long.txt", long)
    assert content(files.read("/long.txt")) == long
    files.upload_files([("/a.bin", bytes(range(256)) * 20)])
    assert files.download_files(["/a.bin"])[0].content == bytes(range(256)) * 20
    assert files.read("/a.bin").file_data["encoding"] == "base64"


def test_another_store_is_refused(packs):
    plain = KnowledgePackStore(roomy_engine(), packs, MemoryFactStore(HashEmbedder()))
    with pytest.raises(OptionError, match="fields="):
        deep.PackBackend(plain, namespace=lambda _: SPACE)


def test_its_tool_gives_the_model_the_words_of_the_file(files, packs):
    """But for the line above them, which says how many lines there are."""
    files.write("/log.txt", TEXT)
    call = {"name": "read_file", "args": {"file_path": "/log.txt"}, "id": "a"}
    asked = [HumanMessage("Read."), AIMessage("", tool_calls=[call])]
    read = {}
    for name, backend in (("packs", files), ("text", StoreBackend(store=files._items, namespace=lambda _: SPACE))):
        graph = StateGraph(AgentState)
        tools = [each for each in FilesystemMiddleware(backend=backend).tools if each.name == "read_file"]
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "tools")
        read[name] = graph.compile().invoke({"messages": asked})["messages"]
    [handle] = [str(handle) for *_, handle in find_handles(read["packs"][-1].text)]
    about, shown = read["text"][-1].text.split("\n", 1)
    assert read["packs"][-1].text.split("\n", 1)[1] == handle
    same = [*asked, read["packs"][-1].model_copy(update={"content": f"{about}\n{handle}"})]
    model = ChatKnowledgePacks(engine=roomy_engine(), store=packs, namespaces=[namespace_of(SPACE)])
    assert shown == TEXT.removesuffix("\n")
    assert model.get_num_tokens_from_messages(same) == model.get_num_tokens_from_messages(read["text"])


def test_a_deep_agent_is_bounded_by_packs(files, packs):
    """The entry point's profile reaches an agent with one of our models."""
    if not entry_points(group="deepagents.harness_profiles", name="knowledge_packs"):
        deep.register()  # The project was installed before it had this entry point.
    model = ChatKnowledgePacks(engine=roomy_engine(), store=packs, namespaces=[namespace_of(SPACE)], max_tokens=8)
    agent = deepagents.create_deep_agent(model, backend=files)
    nodes = set(agent.get_graph().nodes)
    assert "KnowledgePackMiddleware.before_model" in nodes
    assert not any(node.startswith("SummarizationMiddleware") for node in nodes)
    files.write("/log.txt", TEXT)
    call = {"name": "read_file", "args": {"file_path": "/log.txt"}, "id": "a"}
    found = ToolMessage(content(files.read("/log.txt")), tool_call_id="a")
    state = agent.invoke({"messages": [HumanMessage("Read."), AIMessage("", tool_calls=[call]), found]})
    assert state["packs"] == [found.text]
    assert state["messages"][-1].response_metadata["kp"]["pack_tokens"] > 0
