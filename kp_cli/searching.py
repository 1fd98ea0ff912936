"""`kp search`: the facts nearest to a question. It loads neither a model nor an engine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from kp_cli.options import (
    MOST_FACTS,
    JsonFlag,
    Namespace,
    Place,
    PlaceOptions,
    Where,
    about_filter,
    filter_of,
    is_store,
    spread,
)
from kp_cli.output import about_hit, console, sourced, tell
from kp_core import Handle


@spread
def search(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for.")],
    *,
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=MOST_FACTS, help="How many facts.")] = 4,
    where: Where = None,
    namespace: Namespace = None,
    options: PlaceOptions,
    as_json: JsonFlag = False,
) -> None:
    """Find the facts nearest to a question: score, text, and the handle where there is a pack."""
    with options.open(place, read_only=True) as collection:
        passes = filter_of(where)
        hits = collection.search(question, k, where=passes, namespace=namespace)
        unmet = f"\n{about_filter(passes, collection)}" if passes and not hits else ""
        if namespace and namespace not in (spaces := collection.namespaces()):
            unmet = f"\nNo fact is in the namespace {namespace}; there are {', '.join(spaces) or 'none'}."
        folder, count = options.folder(place, collection), len(collection)
    handles: list[Handle | None] = [None] * len(hits)
    if is_store(folder):
        from kp_core import PackStore

        store = PackStore(folder)
        all_handles = [store.handle(hit.fact.text, hit.fact.namespace) for hit in hits]
        handles = [handle if handle in store else None for handle in all_handles]
    out, records = console(), []
    for number, (hit, handle) in enumerate(zip(hits, handles, strict=True), 1):
        fact = hit.fact
        about = about_hit(hit, fact.text, handle)
        records.append(about | {"metadata": dict(fact.metadata), "namespace": fact.namespace})
        if not as_json:
            title = f"  {fact.title or sourced(fact) or fact.id}"
            out.print(Text.assemble((f"{number}. {hit.score:.3f}", "bold"), title), soft_wrap=True)
            out.print(fact.text)
            parts = [str(handle or "no pack"), sourced(fact), f"id {fact.id}"]
            out.print(" · ".join(part for part in parts if part) + "\n", style="dim")
    tell({"question": question, "hits": records}, f"The nearest {len(hits)} of {count} facts.{unmet}", as_json=as_json)
