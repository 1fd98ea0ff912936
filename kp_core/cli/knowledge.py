"""`kp build`, `add`, `remove`, `search`: facts into collections and out of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kp_core.cli.ingesting import SourceOptions, ingest, tell
from kp_core.cli.shared import (
    CollectionPath,
    JsonFlag,
    SearchOptions,
    Where,
    console,
    counted,
    did_you_mean,
    filter_of,
    open_collection,
    print_json,
    spread,
)
from kp_core.errors import BankError, SourceError
from kp_core.facts import Fact, Hit
from kp_core.facts.filters import predicate
from kp_core.packs.store import PackStore

__all__ = ["add", "build", "remove", "search"]

_Chroma = Annotated[bool, typer.Option("--chroma/--no-chroma", help="Keep the vectors in Chroma too.")]
_Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for another writer.")]


@spread
def build(  # noqa: PLR0913 - one parameter per option or group of options
    collection: CollectionPath,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", help="JSON lines, CSV, text, Markdown, PDF, HTML, folders."),
    ] = None,
    *,
    embedder: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Embedding model: a folder, or a name on the hub. Default: the bundled one."
        ),
    ] = None,
    bank_size: Annotated[int, typer.Option(min=1, help="Facts per bank, about.")] = 20,
    recall: Annotated[float, typer.Option(help="Share of the nearest facts that a search should find.")] = 0.99,
    source: SourceOptions,
    chroma: _Chroma = True,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Make a collection of the facts in files or a dataset, or go on where an interrupted build stopped.

    Facts are stored as they come; what is already stored is not embedded again.
    """
    if not files and source.dataset is None:
        raise typer.BadParameter("Got neither files nor --dataset; give at least one.")
    skipped: list[SourceError] = []
    facts = source.facts(files or [], skipped)
    options = {"bank_size": bank_size, "recall": recall, "mirror": chroma, "wait": wait}
    with open_collection(collection, embedder, new=True, **options) as opened:
        report = ingest(opened, facts, files or [], source.ttl)
        if report.added:
            opened.rebuild()
        tell(opened, report, skipped, as_json=as_json)


@spread
def add(  # noqa: PLR0913 - one parameter per option or group of options
    collection: CollectionPath,
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE...]", help="Files as for `kp build`.")] = None,
    *,
    fact: Annotated[list[str] | None, typer.Option("--fact", metavar="TEXT", help="A fact; may be repeated.")] = None,
    fact_id: Annotated[str, typer.Option("--id", help="Id of the one --fact; default: a digest of it.")] = "",
    title: Annotated[str, typer.Option(help="Title of --fact.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the fact that has this --id.")] = False,
    source: SourceOptions,
    chroma: _Chroma = True,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Add facts to a collection; banks that grow too large are split, the others stay as they are."""
    texts = fact or []
    if not files and not texts and source.dataset is None:
        raise typer.BadParameter("Got neither files nor --fact nor --dataset; give at least one.")
    if (fact_id or replace) and len(texts) != 1:
        raise typer.BadParameter("--id and --replace go with exactly one --fact.")
    if replace and not fact_id:
        raise typer.BadParameter("--replace needs --id.")
    skipped: list[SourceError] = []
    facts = source.facts(files or [], skipped)
    with open_collection(collection, mirror=chroma, wait=wait) as opened:
        given = [Fact(text, title=title, id=fact_id, namespace=source.namespace or "default") for text in texts]
        if replace:
            new = opened.update(given[0])
            about = {"id": new.id, "version": new.version}
            _print(about, f"{new.id} has version {new.version}.", as_json=as_json)
            return
        report = ingest(opened, itertools.chain(given, facts), files or [], source.ttl)
        tell(opened, report, skipped, as_json=as_json)


def remove(  # noqa: PLR0913 - one parameter per option
    collection: CollectionPath,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids, or how they begin.")] = None,
    *,
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
    chroma: _Chroma = True,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Remove facts, by id or by filter."""
    if not ids and where is None:
        raise typer.BadParameter("Got neither ids nor --where; give one.")
    with open_collection(collection, mirror=chroma, wait=wait) as opened:
        facts = list(opened.facts())
        gone = {_found(given, facts).id: None for given in ids or []}
        wanted = filter_of(where)
        if wanted is not None:
            gone |= dict.fromkeys(fact.id for fact in filter(predicate(wanted), facts))
        count = len(gone) if dry_run else opened.delete(gone)
        said = f"Facts that would go: {count}." if dry_run else f"Facts removed: {count}; left: {len(opened)}."
        _print({"removed": list(gone), "dry_run": dry_run, "facts": len(opened)}, said, as_json=as_json)


@spread
def search(  # noqa: PLR0913 - one parameter per option or group of options
    collection: CollectionPath,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for.")],
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="How many facts.")] = 4,
    probes: Annotated[int | None, typer.Option(min=1, help="Banks to search; default: as calibrated.")] = None,
    options: SearchOptions,
    as_json: JsonFlag = False,
) -> None:
    """Find the facts nearest to a question: handle, text, score, bank, and why."""
    with open_collection(collection, read_only=True) as opened:
        hits = opened.search(question, k, probes=probes, **options.keywords())
        order = opened.ranks(question)
        calibrated = opened.calibration.probes_of(opened.banks) if opened.calibration else opened.banks
        searched = min(opened.banks, probes or calibrated)
    store = PackStore(collection / "packs") if (collection / "packs").is_dir() else None
    ranks = {number: place for place, number in enumerate(order, 1)}
    if as_json:
        told = [_hit(hit, ranks[hit.bank], store) for hit in hits]
        print_json({"question": question, "banks": len(order), "probes": searched, "hits": told})
        return
    out = console()
    for place, hit in enumerate(hits, 1):
        found = _hit(hit, ranks[hit.bank], store)
        title = f"  {hit.fact.title or hit.fact.id}"
        out.print(Text.assemble((f"{place}. {hit.score:.3f}", "bold"), title), soft_wrap=True)
        out.print(hit.fact.text)
        rank = "nearest" if ranks[hit.bank] == 1 else f"rank {ranks[hit.bank]}"
        why = f"bank {hit.bank}, {rank} of {counted(len(order), 'bank')}"
        parts = [str(found["handle"] or "no pack"), why, hit.fact.source, f"id {hit.fact.id}"]
        out.print(f"{' · '.join(part for part in parts if part)}\n", style="dim", soft_wrap=True)
    out.print(f"Found {len(hits)} of {k}; searched {searched} of {counted(len(order), 'bank')}.")


def _hit(hit: Hit, rank: int, store: PackStore | None) -> dict[str, object]:
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
        "bank_rank": rank,
    }


def _print(data: dict[str, object], said: str, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        console().print(said)


def _found(given: str, facts: list[Fact]) -> Fact:
    """The fact whose id is or begins with `given`."""
    exact = [fact for fact in facts if fact.id == given]
    found = exact or [fact for fact in facts if fact.id.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BankError(f"Got the id {given!r}; {len(found)} facts begin so. Give more of it.")
    hint = did_you_mean(given, (fact.id for fact in facts), "`kp search` shows ids.")
    raise BankError(f"Got the id {given!r}; none of the {len(facts)} facts has it. {hint}")
