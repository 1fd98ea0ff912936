"""`kp build`, `edit`, `remove`: add facts to collections, correct and remove them."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kp_cli import waiting
from kp_cli.options import (
    PLACES,
    JsonFlag,
    ModelOptions,
    Namespace,
    Place,
    PlaceOptions,
    TargetPath,
    Where,
    about_filter,
    did_you_mean,
    existing,
    filter_of,
    is_collection,
    is_store,
    spread,
)
from kp_cli.output import console, print_json, tell
from kp_cli.sources import OnError, read_facts
from kp_cli.sources.texts import STDIN
from kp_core import Handle, PackStore, Session
from kp_core.banks import Added, ChromaFactStore, Fact, FactStore
from kp_core.banks.compiling import Unit, compile_cost, find_compiled, provenance_of
from kp_core.banks.delivery import KV, Delivery
from kp_core.bundled import converted_folders
from kp_core.errors import FactError, ModelError, PackError
from kp_core.packs.codec import Compression
from kp_core.packs.pack import PackKey
from kp_core.packs.view import Packs
from kp_core.plan.engine import Compiles
from kp_core.progress import bar_of
from kp_methods import edit as editing

logger = logging.getLogger(__name__)

_SERVER_THREADS = 8
_SHOWN = 5
_FIRST = 512  # Facts that are read before a collection is made: those of the first batch.
MUCH_BYTES = 10**9
"""A build that writes more bytes says how to write fewer."""

_Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for another writer.")]


@spread
def build(  # noqa: C901, PLR0913 - one parameter per option or group of options, and their checks
    place: Place,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON lines, CSV, text, Markdown, Word, PDF, HTML, slides, sheets, folders; - for stdin."),
    ] = None,
    *,
    fact: Annotated[list[str] | None, typer.Option("--fact", metavar="TEXT", help="A fact; may be repeated.")] = None,
    fact_id: Annotated[str, typer.Option("--id", help="Id of the one --fact; default: a digest of it.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace facts of the same ids, edited ones too.")] = False,
    namespace: Namespace = None,
    on_error: Annotated[OnError, typer.Option(help="What to do with rows that are no facts.")] = "raise",
    max_chars: Annotated[int, typer.Option(help="Cut longer paragraphs of texts and documents; in characters.")] = 2000,
    encoding: Annotated[str | None, typer.Option(help="Encoding of text that is not UTF-8, e.g. cp1252.")] = None,
    options: PlaceOptions,
    model: ModelOptions,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile packs of all facts now, not when a search first finds them.")
    ] = False,
    unit: Annotated[Unit, typer.Option(help="What a pack holds.")] = "fact",
    kv: Annotated[KV, typer.Option(help="Whether --compile stores KV, or text alone.")] = "stored",
    compress: Annotated[
        Compression | None, typer.Option(help="How KV is stored; default: none, at a server as `kp serve --compress`.")
    ] = None,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Make a collection, add facts to it, or continue an interrupted build.

    Facts are stored as they are read. Facts that are already stored are not embedded again. --replace also removes the
    packs of old texts.
    """
    texts, paths, skipped = fact or [], files or [], list[FactError]()
    is_empty, is_ours = not (paths or texts), is_collection(place)
    if Path(place).is_file() or (is_empty and Path(place).exists() and not is_ours):
        raise typer.BadParameter(f"Got no name. `kp build NAME {shlex.join([place, *map(str, paths)])}` makes one.")
    if is_empty and not (is_ours and compiled):
        raise typer.BadParameter("Got neither files nor --fact; give one.")
    if fact_id and len(texts) != 1:
        raise typer.BadParameter("--id goes with exactly one --fact.")
    new_facts = [Fact(text, id=fact_id, namespace=namespace or "default") for text in texts]
    paths = [path if str(path) == STDIN else existing(path) for path in paths]
    settings: dict[str, Any] = {"max_chars": max_chars, "encoding": encoding, "namespace": namespace}
    facts = itertools.chain(new_facts, read_facts(paths, on_error=on_error, skipped=skipped.append, **settings))
    # A missing model must fail before hours of embedding.
    session = model.load() if compiled else None
    if session is not None and session.compiler and compress is not None:
        raise typer.BadParameter(f"Got --compress {compress}, but `kp serve --compress` decides for a server.")
    # What cannot be read must fail before a collection is made.
    with waiting("Reading"):
        facts = itertools.chain(list(itertools.islice(facts, _FIRST)), facts)
    with options.open(place, new=not replace, wait=wait) as collection:
        if replace and fact_id:
            collection.get(fact_id, namespace=new_facts[0].namespace)  # An unknown id is an error.
        used = _used(collection, place, options) if replace else {}
        read: dict[tuple[str, str], set[str]] = {}
        added = _ingest(collection, _noted(facts, paths, read) if is_ours else facts, paths, overwrite=replace)
        outdated = _outdated(collection, read)
        report = {
            **asdict(added),
            "skipped": [str(error) for error in skipped],
            "facts": len(collection),
            "outdated": outdated,
        }
        server = session.compiler.base_url if session is not None and session.compiler and kv == "stored" else ""
        folder = options.noted_folder(place, collection, server) if compiled else options.folder(place, collection)
        if replace:
            _collect(collection, place, options, used=used)
        if not as_json:
            console().print(_summary(added, len(skipped), len(collection), is_empty=is_empty))
            for source, ids in outdated.items():
                removed = f"`kp remove {shlex.quote(place)} --source {shlex.quote(source)}`"
                console().print(f"Facts that {source} had, and that stay: {len(ids)}. {removed}, then build again.")
        if session is not None:
            delivery = Delivery(collection, session, folder, unit=unit, kv=kv, compress=compress or "none")
            report["plan"] = _compile(delivery, session, as_json=as_json)
        if not as_json and len(collection):
            packs = f" --packs {shlex.quote(options.packs)}" if options.packs else ""
            console().print(f'`kp ask {shlex.quote(place)} "QUESTION"{packs}` answers from it.')
    if as_json:
        print_json(report)


@spread
def edit(  # noqa: PLR0913 - one parameter per option or group of options
    place: TargetPath,
    name: Annotated[str, typer.Argument(metavar="ID", help="A fact's id or its first characters; or a handle.")],
    *,
    old: Annotated[str, typer.Option(help="The statement to correct, exactly as written; it must occur once.")],
    new: Annotated[str, typer.Option(help="The corrected statement.")],
    how: Annotated[
        editing.How, typer.Option(help="amend: add a correcting line; overwrite: its KV (approximate); rebuild: anew.")
    ] = "amend",
    options: PlaceOptions,
    model: ModelOptions,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Correct a fact of a collection, or a pack of a store. The old pack stays under its own handle."""
    if is_store(place):
        store, old_handle, session = PackStore(place), Handle.parse(name), model.load()
        pack = editing.edit(store.get(old_handle, PackKey(session.fingerprint)), old, new, session, how=how)
        new_handle = store.put(pack)
    else:
        with options.open(place, wait=wait) as collection:
            fact = collection.get(_full_id(name, collection))
            editing.replaced(fact.text, old, new)  # What cannot be corrected must fail before a model is loaded.
            session, store = model.load(), PackStore(options.noted_folder(place, collection))
            delivery = Delivery(collection, session, store, kv="stored", namespace=fact.namespace)
            with waiting("Compiling"):
                edited = editing.edit_fact(delivery, fact.id, old, new, how=how)
        old_handle, new_handle = (store.handle(version.text, version.namespace) for version in (fact, edited))
        pack = store.get(new_handle, PackKey(session.fingerprint))
    errata = [correction.line for correction in pack.edits.corrections]
    report = {"handle": str(new_handle), "was": str(old_handle), "tokens": len(pack.token_ids), "errata": errata}
    report |= {"text": pack.text, "how": pack.history[-1].how}
    message = "\n".join(errata) or f"It says now: {pack.text}"
    if is_store(place) and is_collection(str(Path(place).parent)):
        parent = Path(place).parent
        message += f"\nThe facts of {parent} stay as they are; `kp edit {shlex.quote(str(parent))} ID` edits one."
    tell(report, f"{new_handle} in place of {old_handle}: {len(pack.token_ids)} tokens.\n{message}", as_json=as_json)


@spread
def remove(  # noqa: C901, PLR0913 - one parameter per option, and their checks
    place: Annotated[
        str | None,
        typer.Argument(metavar="COLLECTION", help="The collection: a folder, or the URL of a Chroma server."),
    ] = None,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids, or their first characters.")] = None,
    *,
    where: Where = None,
    source: Annotated[
        str | None, typer.Option(metavar="FILE", help="Only facts of this source, written as `kp search` shows it.")
    ] = None,
    namespace: Namespace = None,
    unused: Annotated[
        bool,
        typer.Option(
            "--unused", help="Remove no facts, only packs that none uses: also those of others in its places."
        ),
    ] = False,
    models: Annotated[
        bool, typer.Option("--models", help="Remove only models that were unpacked on this machine.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    options: PlaceOptions,
    wait: _Wait = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Remove the facts that match all of ids, filter and source, and packs that no fact uses any more."""
    if models is (place is not None):
        raise typer.BadParameter(
            "Expected a COLLECTION, or --models and none: models are unpacked for all collections."
        )
    if place is None:
        _remove_models(dry_run=dry_run, as_json=as_json)
        return
    passes = filter_of(where)
    tests = [test for test in (passes, source and {"kp:source": source}) if test]
    if unused == bool(ids or tests):
        raise typer.BadParameter("Got neither ids nor --where nor --source nor --unused; give one (--unused alone).")
    with options.open(place, wait=wait) as collection:
        matching = list[Fact]()
        if not unused:
            full_ids = [_full_id(prefix, collection) for prefix in ids] if ids else None
            where_all = {"$and": tests} if tests else None
            matching = list(collection.stored(ids=full_ids, where=where_all, namespace=namespace))
        report: dict[str, Any] = {"removed": [fact.id for fact in matching], "dry_run": dry_run}
        message = f"Facts that would be removed: {len(matching)}."
        if not dry_run:
            used = {} if unused else _used(collection, place, options)
            for space in {fact.namespace for fact in matching}:
                collection.delete([fact.id for fact in matching if fact.namespace == space], namespace=space)
            where_from = {"namespace": namespace} if unused else {"used": used}
            packs = report["packs"] = _collect(collection, place, options, **where_from)
            message = f"Facts removed: {len(matching)}; packs: {packs}; facts left: {len(collection)}."
        elif unused:
            found = _deliveries(collection, place, options, namespace)
            packs = report["packs"] = sum(len(delivery.orphans()) for _, delivery in found)
            message = f"Packs that would be removed: {packs}."
        if matching and not dry_run:
            where = "FOLDER` on its server" if collection.path is None else f"{shlex.quote(str(collection.path))}`"
            message += (
                f" Chroma's files still hold their text: `chroma vacuum --path {where} clears all but the log of its "
                "last thousand changes."
            )
        if passes and not matching:
            message += f" {about_filter(passes, collection)}"
        if source and not matching:
            raise FactError(f"Got the source {source!r}; no such fact has it. Write it as `kp search` shows it.")
        tell({**report, "facts": len(collection)}, message, as_json=as_json)


def _remove_models(*, dry_run: bool, as_json: bool) -> None:
    folders = converted_folders()
    for folder in () if dry_run else folders:
        shutil.rmtree(folder)
    size = sum(made["bytes"] for made in folders.values()) / 1e9
    message = f"Unpacked models {'that would be ' * dry_run}removed: {len(folders)}, {size:,.1f} GB."
    tell({"removed": [*map(str, folders)], "dry_run": dry_run}, message, as_json=as_json)


def _ingest(collection: ChromaFactStore, facts: Iterable[Fact], files: Iterable[Path], *, overwrite: bool) -> Added:
    """Add facts, with a progress bar that counts bytes of the files."""

    def read() -> Iterator[Fact]:
        for fact in facts:
            bar.update(len(fact.text.encode()))
            yield fact

    # Standard input is not a file; its size is unknown.
    total = sum(path.stat().st_size for root in files for path in (root, *root.rglob("*")) if path.is_file())
    with bar_of("Adding", total or None, "B") as bar, waiting("Embedding facts"):
        added = collection.add(read(), overwrite=overwrite)
        bar.update(max(0, total - bar.n))  # A file has more bytes than its text.
    return added


def _noted(facts: Iterable[Fact], files: Iterable[Path], read: dict[tuple[str, str], set[str]]) -> Iterator[Fact]:
    """`facts`. `read` gets the ids of those whose source is one of `files` or in one, by namespace and source."""
    roots = set(files)
    for fact in facts:
        if not roots.isdisjoint((path := Path(fact.source), *path.parents)):
            read.setdefault((fact.namespace, fact.source), set()).add(fact.id)
        yield fact


def _outdated(collection: ChromaFactStore, read: Mapping[tuple[str, str], set[str]]) -> dict[str, list[str]]:
    """Of each file that was `read` the ids of facts that it had when it was read earlier, and has no more."""
    found: dict[str, list[str]] = {}
    for space in {namespace for namespace, _ in read}:
        sources = [source for namespace, source in read if namespace == space]
        for start in range(0, len(sources), _FIRST):
            where = {"kp:source": {"$in": sources[start : start + _FIRST]}}
            for fact in collection.stored(where=where, namespace=space):
                if fact.id not in read[space, fact.source]:
                    found.setdefault(fact.source, []).append(fact.id)
    return found


def _summary(added: Added, skipped: int, facts: int, *, is_empty: bool) -> str:
    lines = [f"Facts added: {added.added}; already stored: {added.duplicates}; skipped: {skipped}."]
    if not (is_empty or added.added or added.duplicates or added.superseded or skipped):
        types = "JSON lines, CSV, text, Markdown, Word, PDF and HTML"
        lines.append(f"Nothing was found there. {types} are read; `kp build --help` says more.")
    if corrected := added.superseded:
        ids = ", ".join(corrected[:_SHOWN]) + (", …" if len(corrected) > _SHOWN else "")
        lines.append(f"Corrected in the collection earlier, and left as they are: {ids}.")
    return "\n".join([*lines, f"Now {facts:,} fact{'s' * (facts != 1)}."])


def _compile(delivery: Delivery, session: Session, *, as_json: bool) -> dict[str, Any]:
    """Print the cost, compile, and return the cost as JSON. An interrupted run continues where it stopped."""
    units, is_lazy, compress = delivery.all_units(), delivery.kv == "lazy", delivery.compress
    server = None if is_lazy else session.compiler
    compiled, _ = find_compiled(units, session, delivery.store, lazy=is_lazy)
    missing = [unit.text for unit in units if (unit.namespace, unit.text) not in compiled]
    tokens, nbytes, seconds = compile_cost(missing, session, lazy=is_lazy, compress=compress)
    count, stored = len(missing), len(units) - len(missing)
    plan: dict[str, Any] = {"packs": count, "tokens": tokens, "stored": stored, "compress": compress}
    if server is None:
        plan |= {"bytes": nbytes, "minutes": seconds / 60}
        kind = "" if compress == "none" else f" ({compress})"
        price = f", {nbytes / 1e6:,.1f} MB on disk{kind}, about {seconds / 60:.1f} minutes"
    else:  # Only the server knows bytes and time.
        plan["server"], price = server.base_url, f", by {server.base_url}"
    about = f"To compile: {count:,} packs of {tokens:,} tokens{price}; compiled already: {stored:,}."
    typer.echo(about, err=as_json)
    if server is None and nbytes > MUCH_BYTES:
        typer.echo(f"That is {nbytes / 1e9:.1f} GB; `--kv lazy` stores text alone, and computes KV on use.", err=True)
    handles = delivery.compile(units)
    if server is not None:
        compiled_units = [unit for unit, handle in zip(units, handles, strict=True) if handle]
        _compile_there(server, compiled_units, delivery.unit)
    return plan


def _compile_there(server: Compiles, units: Sequence[Fact], unit: Unit) -> None:
    """Have a server compile texts, several at a time, so that it can batch them. It warns of refused texts."""

    def compiled(fact: Fact) -> None:
        try:
            server.compile(fact.text, fact.namespace, "user", provenance_of(fact, unit))
        except PackError as error:
            logger.warning("Fact %s is not compiled: %s", fact.id, error)

    with ThreadPoolExecutor(_SERVER_THREADS) as pool:
        for _ in bar_of("Compiling", len(units), "pack", pool.map(compiled, units)):
            pass  # An error in a thread is raised here, and cancels the rest.


def _used(facts: ChromaFactStore, place: str, options: PlaceOptions) -> dict[str, set[Handle]]:
    """The packs of a collection, by place."""
    return {folder: {*delivery.used_and_not()[0]} for folder, delivery in _deliveries(facts, place, options)}


def _collect(
    facts: ChromaFactStore,
    place: str,
    options: PlaceOptions,
    *,
    used: Mapping[str, set[Handle]] | None = None,
    namespace: str | None = None,
) -> int:
    """Remove the packs, of `namespace` if given, that no fact uses any more, also on servers. Returns how many.

    `used` are those that facts used earlier: outside of the collection's folder, where packs of others may be, only
    these are removed, and what they were before edits. Raises `ModelError` if a server does not answer; what it has is
    then left here, too, so that `--unused` finds it.
    """
    count, servers = 0, list[Any]()
    if addresses := options.servers(facts):
        from kp_serve.engine import VLLMEngine

        servers = [VLLMEngine(address, api_key=os.environ.get("KP_API_KEY")) for address in addresses]
    for folder, delivery in _deliveries(facts, place, options, namespace):
        unused = delivery.orphans()
        if used is not None and folder != options.own(place, facts):
            unused = [handle for handle in unused if _latest(handle, delivery.store) in used.get(folder, ())]
        packs = [(handle, pack) for handle in unused if (pack := delivery.store.peek(handle)) is not None]
        for server, (handle, pack) in itertools.product(servers, packs):
            try:
                server.forget(pack.text, handle.namespace)
            except ModelError as error:
                raise ModelError(
                    f"{error} It may have packs that no fact uses any more: `kp remove {shlex.quote(place)} --unused` "
                    "tries again, and removes what others keep in a place that they share. A server that is gone "
                    f"stands in {PLACES} of the collection; take it out there."
                ) from error
        delivery.forget(*unused)
        count += len(unused)
    return count


def _latest(handle: Handle, store: Packs) -> Handle:
    """The pack that stands in the place of an edited one; `handle` itself if it was not edited."""
    seen = {handle}
    while isinstance(successor := store.buried(handle), Handle) and successor not in seen:
        seen.add(handle := successor)
    return handle


def _deliveries(
    facts: ChromaFactStore, place: str, options: PlaceOptions, namespace: str | None = None
) -> Iterator[tuple[str, Delivery]]:
    """Each place that has packs of a collection, with a delivery from there."""
    for folder in options.folders(place, facts):
        if is_store(folder):
            yield folder, Delivery(facts, None, folder, namespace=namespace)


def _full_id(prefix: str, facts: FactStore) -> str:
    """The id that is or begins with `prefix`. Raises `FactError` if none does, or several do, and for a blank one."""
    if not prefix.strip():  # All begin with it.
        raise FactError(f"Got the id {prefix!r}; expected an id, or its first characters. `kp search` shows ids.")
    if any(facts.stored(ids=[prefix])):
        return prefix
    ids = [fact.id for fact in facts.stored()]
    matching_ids = {full_id for full_id in ids if full_id.startswith(prefix)}
    if len(matching_ids) == 1:
        return matching_ids.pop()
    if matching_ids:
        raise FactError(f"Got the id {prefix!r}; the ids of {len(matching_ids)} facts begin so. Give more characters.")
    hint = did_you_mean(prefix, ids, "`kp search` shows ids.")
    raise FactError(f"Got the id {prefix!r}; none of the {len(ids)} facts has it. {hint}")
