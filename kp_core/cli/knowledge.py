"""`kp build`, `add`, `remove`, `gc`: facts into collections and out of them."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from kp_core.cli.compiling import CompileOptions, say_plan, units_of
from kp_core.cli.ingesting import SourceOptions, ingest, report, say
from kp_core.cli.places import Place, PlaceOptions, ReadOptions, is_collection, open_collection
from kp_core.cli.shared import (
    JsonFlag,
    Where,
    checked_namespace,
    did_you_mean,
    filter_of,
    is_store,
    print_json,
    spread,
    tell,
)
from kp_core.delivery import Delivery
from kp_core.errors import FactError, SourceError
from kp_core.facts import ChromaFactStore, Fact, FactStore
from kp_core.facts.banking import BANK_SIZE
from kp_core.packs.store import PackStore

__all__ = ["add", "build", "found_id", "gc", "remove"]


_Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for another writer.")]
_Vacuum = Annotated[
    bool, typer.Option("--vacuum/--no-vacuum", help="Take what was removed off the disk; Chroma keeps it until then.")
]


@spread
def build(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="JSON lines, CSV, text, Markdown, Word, PDF, HTML, folders; - is standard input."
        ),
    ] = None,
    *,
    bank_size: Annotated[
        int | None,
        typer.Option(min=1, help="Make banks now, of about so many facts. Default: when needed, of as many as before."),
    ] = None,
    source: SourceOptions,
    options: PlaceOptions,
    compiling: CompileOptions,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Make a collection of the facts in files or a dataset, or go on where an interrupted build stopped.

    Facts are stored as they come; what is already stored is not embedded again.
    """
    there = is_collection(place)
    if not files and source.dataset is None and not (there and (compiling.compile or compiling.dry_run or bank_size)):
        raise typer.BadParameter("Got neither files nor --dataset; give at least one.")
    skipped: list[SourceError] = []
    facts = source.facts(files or [], skipped)
    with ExitStack() as stack:
        if compiling.dry_run:
            store, size = None, bank_size or BANK_SIZE
            if there:
                held = stack.enter_context(open_collection(place, options, read_only=True))
                size = bank_size or held.bank_size
                facts, folder = itertools.chain(held.facts(), facts), options.folder(place, held)
                store = PackStore(folder) if is_store(folder) else None
            plan = compiling.plan(units_of(facts, compiling.unit, size), store, compiling.load())
            if as_json:
                print_json({"dry_run": True, "plan": plan, "skipped": [str(error) for error in skipped]})
            else:
                say_plan(plan)
            return
        # A model that is not there is said before hours of embedding.
        session = compiling.load() if compiling.compile else None
        opened = stack.enter_context(open_collection(place, options, new=True, wait=wait, bank_size=bank_size))
        told = report(opened, ingest(opened, facts, files or [], source.ttl), skipped)
        if bank_size:
            opened.rebuild()
        if not as_json:
            say(told)
        if session is not None:
            store = PackStore(options.folder(place, opened))
            told["plan"] = compiling.run(opened, store, session, as_json=as_json)
        if as_json:
            print_json(told)


@spread
def add(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE...]", help="Files as for `kp build`.")] = None,
    *,
    fact: Annotated[list[str] | None, typer.Option("--fact", metavar="TEXT", help="A fact; may be repeated.")] = None,
    fact_id: Annotated[str, typer.Option("--id", help="Id of the one --fact; default: a digest of it.")] = "",
    title: Annotated[str, typer.Option(help="Title of --fact.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the fact that has this --id.")] = False,
    source: SourceOptions,
    options: PlaceOptions,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Add facts to a collection; with --replace, packs of the old text go."""
    texts = fact or []
    if not files and not texts and source.dataset is None:
        raise typer.BadParameter("Got neither files nor --fact nor --dataset; give at least one.")
    if (fact_id or replace) and len(texts) != 1:
        raise typer.BadParameter("--id and --replace go with exactly one --fact.")
    if replace and not fact_id:
        raise typer.BadParameter("--replace needs --id.")
    skipped: list[SourceError] = []
    facts = source.facts(files or [], skipped)
    with open_collection(place, options, wait=wait) as opened:
        given = [Fact(text, title=title, id=fact_id, namespace=source.namespace or "default") for text in texts]
        if replace:
            new = opened.update(given[0])
            _collect(opened, options.folder(place, opened))
            about = {"id": new.id, "version": new.version}
            tell(about, f"{new.id} has version {new.version}.", as_json=as_json)
            return
        told = report(opened, ingest(opened, itertools.chain(given, facts), files or [], source.ttl), skipped)
    if as_json:
        print_json(told)
    else:
        say(told)


@spread
def remove(  # noqa: PLR0913 - one parameter per option
    place: Place,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids, or how they begin.")] = None,
    *,
    where: Where = None,
    source: Annotated[str | None, typer.Option(metavar="FILE", help="Only facts of this source.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Only facts of this namespace.", callback=checked_namespace)] = (
        None
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
    vacuum: _Vacuum = True,
    options: PlaceOptions,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Remove facts, by id, filter or source (those that meet all that is given), and packs that no fact uses then."""
    tests = [test for test in (filter_of(where), source and {"kp:source": source}) if test]
    if not ids and not tests:
        raise typer.BadParameter("Got neither ids nor --where nor --source; give one.")
    with open_collection(place, options, wait=wait) as opened:
        asked = [found_id(given, opened) for given in ids] if ids else None
        gone = list(opened.facts(ids=asked, where={"$and": tests} if tests else None, namespace=namespace))
        about: dict[str, Any] = {"removed": [fact.id for fact in gone], "dry_run": dry_run}
        said = f"Facts that would go: {len(gone)}."
        if not dry_run:
            for space in {fact.namespace for fact in gone}:
                opened.delete([fact.id for fact in gone if fact.namespace == space], namespace=space)
            packs, kept = _collect(opened, options.folder(place, opened)), _vacuum(opened, wanted=vacuum)
            about |= {"packs": packs, "vacuumed": not kept}
            said = f"Facts removed: {len(gone)}; packs: {packs}; facts left: {len(opened)}.{kept}"
        tell({**about, "facts": len(opened)}, said, as_json=as_json)


@spread
def gc(
    place: Place, *, vacuum: _Vacuum = True, options: ReadOptions, wait: _Wait = 0.0, as_json: JsonFlag = False
) -> None:
    """Remove packs that no fact uses any more, and take what was removed off the disk."""
    with options.reading(place, read_only=False, wait=wait) as opened:
        packs = _collect(opened, options.folder(place, opened))
        kept = "" if opened.read_only else _vacuum(opened, wanted=vacuum)
    about = {"packs": packs, "vacuumed": not (opened.read_only or kept)}
    tell(about, f"Packs removed: {packs}.{kept}", as_json=as_json)


def _collect(facts: FactStore, folder: str | Path) -> int:
    """Remove the packs in `folder` that no fact uses any more; how many there were."""
    return len(Delivery(facts, None, PackStore(folder)).gc()) if is_store(folder) else 0


def _vacuum(facts: ChromaFactStore, *, wanted: bool) -> str:
    """Vacuum; or why what was removed is still on the disk."""
    if facts.path is None:
        return f" {facts.where} keeps what was removed until `chroma vacuum --path FOLDER` is run there."
    if not wanted:
        return f" Chroma keeps what was removed on the disk until `kp gc {facts.path}`."
    facts.vacuum()
    return ""


def found_id(given: str, facts: FactStore) -> str:
    """The id that is or begins with `given`."""
    if any(facts.facts(ids=[given])):
        return given
    ids = [fact.id for fact in facts.facts()]
    found = {each for each in ids if each.startswith(given)}
    if len(found) == 1:
        return found.pop()
    if found:
        raise FactError(f"Got the id {given!r}; {len(found)} facts begin so. Give more of it.")
    hint = did_you_mean(given, ids, "`kp search` shows ids.")
    raise FactError(f"Got the id {given!r}; none of the {len(ids)} facts has it. {hint}")
