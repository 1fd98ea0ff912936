"""`kp mcp`: a collection as memory for any agent that speaks the Model Context Protocol.

Only this module imports `mcp`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kp_cli.shared import ModelOptions, Place, PlaceOptions, about_hit, checked_namespace, spread
from kp_core.banks import Fact, FactStore, Hit
from kp_core.banks.delivery import Delivery, Found
from kp_core.bundled import needing
from kp_core.errors import KnowledgePackError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

__all__ = ["mcp", "memory_server"]

_ABOUT = (
    "Long-term memory. `search` and `remember` answer with handles (kp:<namespace>/<id>), one per line: the model that "
    "is served with this collection's packs reads each as the text it stands for. Leave handles as they are."
)

_MOST = 50  # Most facts of one search, whatever `k` a model passes.


@spread
def mcp(
    place: Place,
    *,
    namespace: Annotated[
        str, typer.Option(help="Search this namespace alone, and remember into it.", callback=checked_namespace)
    ] = "default",
    create: Annotated[bool, typer.Option("--create", help="Make the collection where there is none.")] = False,
    options: PlaceOptions,
    model: ModelOptions,
) -> None:
    """Serve a collection to agents over MCP (standard input and output): tools `search` and `remember`.

    Results are handles, for an agent whose model we serve; the text goes to programs alone, in the result's `_meta`.
    The model loads when a tool is first called.
    """
    with options.open(place, new=create, hint="--create makes one.") as facts:
        lock, deliveries = threading.Lock(), list[Delivery]()

        def delivery() -> Delivery:
            with lock:
                if not deliveries:
                    settings: dict[str, Any] = {"kv": "stored", "compiled_for": "system", "namespace": namespace}
                    deliveries.append(Delivery(facts, model.load(), options.folder(place, facts), **settings))
            return deliveries[0]

        memory_server(facts, delivery, namespace).run("stdio")


def memory_server(facts: FactStore, delivery: Callable[[], Delivery], namespace: str) -> MCPServer[Any]:
    """A server whose tools read and write `facts` of `namespace`, as packs. Tools call `delivery` when they need it."""
    with needing("kp mcp needs version 2 of mcp", "mcp"):
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import CallToolResult, TextContent, ToolAnnotations

    server = MCPServer("knowledge-packs", instructions=_ABOUT, log_level="WARNING")

    @contextmanager
    def tool_errors() -> Iterator[None]:
        try:
            yield
        except KnowledgePackError as error:
            raise ToolError(str(error)) from error

    def result(found: list[Found]) -> CallToolResult:
        text = "\n".join(unit.content for unit in found) or "Nothing was found."
        metadata = {"documents": [about_hit(unit.hit, unit.hit.fact.text, unit.handle) for unit in found]}
        return CallToolResult(content=[TextContent(type="text", text=text)], _meta=metadata)

    @server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
    @tool_errors()
    def search(question: str, k: int = 4) -> Any:  # noqa: ANN401 - MCP reads these types, and knows no local ones
        """Search the memory for what is known about a question."""
        is_empty = namespace not in facts.namespaces()  # Then no model is loaded.
        return result([] if is_empty else delivery().search(question, min(k, _MOST)))

    @server.tool(annotations=ToolAnnotations(destructive_hint=False, idempotent_hint=True), structured_output=False)
    @tool_errors()
    def remember(text: str) -> Any:  # noqa: ANN401 - as `search`
        """Keep a text for later conversations; what is known already is not kept twice."""
        fact, packs = Fact(text, source="remembered", namespace=namespace), delivery()
        packs.refuse_unreadable([fact])
        # Compile first: a fact that cannot be compiled must not be stored, as searches would find it.
        packs.compile([fact], stored=False, progress=False)
        packs.facts.add([fact])
        return result(packs.deliver([Hit(fact, 1.0)]))

    return server
