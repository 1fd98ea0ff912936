"""`kp search`: the facts nearest to a question. It loads neither a model nor an engine, and is done soon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kp_cli.places import Place, ReadOptions
from kp_cli.shared import JsonFlag, SearchOptions, console, is_store, print_json, sourced, spread
from kp_core.facts import Hit

if TYPE_CHECKING:
    from kp_core import PackStore

__all__ = ["search"]


@spread
def search(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for.")],
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="How many facts.")] = 4,
    probes: Annotated[
        int | None, typer.Option(min=1, help="Look into so many of the nearest banks. Default: at all facts.")
    ] = None,
    options: SearchOptions,
    read: ReadOptions,
    as_json: JsonFlag = False,
) -> None:
    """Find the facts nearest to a question: score, text, and the handle where there is a pack."""
    # Banks are made when they are first asked for.
    with read.reading(place, read_only=probes is None) as opened:
        hits = opened.search(question, k, probes=probes, **options.keywords())
        folder = read.folder(place, opened)
    store = None
    if is_store(folder):
        from kp_core import PackStore

        store = PackStore(folder)
    found = [_hit(hit, store) for hit in hits]
    if as_json:
        print_json({"question": question, "hits": found})
        return
    out = console()
    for number, (hit, about) in enumerate(zip(hits, found, strict=True), 1):
        title = f"  {hit.fact.title or sourced(hit.fact) or hit.fact.id}"
        out.print(Text.assemble((f"{number}. {hit.score:.3f}", "bold"), title), soft_wrap=True)
        out.print(hit.fact.text)
        bank = hit.bank and f"bank {hit.bank}"
        parts = [str(about["handle"] or "no pack"), bank, sourced(hit.fact), f"id {hit.fact.id}"]
        out.print(f"{' · '.join(part for part in parts if part)}\n", style="dim", soft_wrap=True)
    out.print(f"Found {len(hits)} of {k}.")


def _hit(hit: Hit, store: PackStore | None) -> dict[str, object]:
    fact = hit.fact
    handle = store.handle(fact.text, fact.namespace) if store else None
    return {
        "id": fact.id,
        "score": hit.score,
        "handle": str(handle) if store and handle in store else None,
        "text": fact.text,
        "title": fact.title,
        "source": fact.source,
        "metadata": dict(fact.metadata),
        "namespace": fact.namespace,
        "bank": hit.bank,
    }
