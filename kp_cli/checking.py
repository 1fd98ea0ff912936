"""`kp status`, `kp verify`: show what a collection or a store of packs holds, and check it."""

from __future__ import annotations

import logging
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from kp_cli import waiting
from kp_cli.options import JsonFlag, PlaceOptions, TargetPath, is_collection, is_store, spread
from kp_cli.output import table_of, tell
from kp_core import KnowledgePack, PackStore
from kp_core.banks.chroma import is_url
from kp_core.banks.delivery import Delivery
from kp_core.bundled import cache_directory, converted_folders
from kp_core.errors import FactError, FactStoreLockedError, PackError
from kp_core.packs.entry import open_entry

_MOST_ROWS = 20
_HINT = "`kp build COLLECTION FILE...` makes a collection."
_COUNTS = ("packs", "with_kv", "tokens", "bytes")

_Shown: TypeAlias = tuple[dict[str, Any], list[RenderableType]]
"""A report as JSON, and for people."""


@spread
def status(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="A collection, a store of packs or an entry of one.")
    ] = None,
    *,
    options: PlaceOptions,
    as_json: JsonFlag = False,
) -> None:
    """Show what it holds: facts, namespaces, embedder, banks; what is compiled, from where, how large, and when it was
    last used, the latest first. `used` is written once a minute, and when a process ends.

    Without a path: models that were unpacked into the cache folder.
    """
    if path is None:
        report, shown = _about_models()
    elif is_collection(path):
        report, shown = _about_collection(path, options)
    else:
        report, shown = _about_store(path) if is_store(path) else _about_entry(Path(path))
    tell(report, Group(*shown), as_json=as_json)


def _about_models() -> _Shown:
    folders, table = converted_folders(), Table("unpacked", "MB", "into")
    for folder, made in folders.items():
        table.add_row(made["source"], f"{made['bytes'] / 1e6:,.1f}", folder.name)
    line = f"Models unpacked in {cache_directory()}: {len(folders)}. `kp remove --models` removes them."
    return {str(folder): made for folder, made in folders.items()}, [*([table] if folders else []), line]


def _about_collection(path: str, options: PlaceOptions) -> _Shown:
    with options.open(path, read_only=True) as store:
        facts, banks, folder = list(store.facts()), None, options.folder(path, store)
        with suppress(FactError):  # Raised if banks are not made yet, as this only reads.
            banks = len(store.banks())
        report = {
            "collection": store.where,
            "facts": len(facts),
            "namespaces": dict(Counter(fact.namespace for fact in facts)),
            "embedder": store.embedder.name,
            "banks": banks if facts else None,
            "sources": len({fact.source for fact in facts}),
            "updated": sum(fact.version > 1 for fact in facts),
            "expiring": sum(fact.expires is not None for fact in facts),
            "bytes": {"text": sum(len(fact.text.encode()) for fact in facts), "chroma": store.nbytes},
        }
    if not is_store(folder):
        hint = f"No packs yet. `kp build {shlex.quote(path)} --compile` or `kp ask` compiles some."
        return report, [table_of(report), hint]
    packs, shown = _about_store(folder)
    return {**report, "packs": packs}, [table_of(report), *shown]


def _about_entry(path: Path) -> _Shown:
    if not path.is_file():
        raise FactError(f"{path} is neither a collection, nor a store of packs, nor the entry of one. {_HINT}")
    try:
        file = open_entry(path.read_bytes())
    except PackError as error:
        raise PackError(f"{path} is no entry of a store, or damaged: {error}") from error
    report = {
        "owners": sorted(file.entry.owners),
        "tokens": len(file.entry.token_ids),
        "prefix_tokens": file.entry.at,
        "label": file.entry.label,
        "compression": file.compression,
        "fingerprint": file.entry.model.to_dict(),
        "file_bytes": path.stat().st_size,
    }
    return report, [table_of(report)]


def _about_store(path: str) -> _Shown:
    """Sums over a store of packs, and a row for each source that packs were made of, the one used last first."""
    store = PackStore(path)
    used, packs, entries = store.last_used(), defaultdict[str, list[dict[str, Any]]](list), list[KnowledgePack]()
    for handle in store:
        of_pack = list(store.entries(handle))
        if not of_pack:  # Damaged, or removed meanwhile.
            continue
        entries += of_pack
        origin, size = of_pack[0].provenance, sum(entry.stored_bytes for entry in of_pack)
        row = {"packs": 1, "with_kv": int(size > 0), "tokens": len(of_pack[0].token_ids), "bytes": size}
        source = origin.get("source") or origin.get("title") or "(not recorded)"
        packs[source].append(row | {"used": used.get(str(handle), 0.0)})
    sources = sorted((_summed(*rows) for rows in packs.items()), key=lambda row: -(row["used"] or 0))
    kept = [size for _, size in store.kept()]
    report = {
        "store": path,
        **_summed("all", sources),
        "entries": len(entries),
        "bytes": store.nbytes,
        "max_bytes": store.quota.max_bytes,
        "compression": dict(Counter(entry.compression for entry in entries if entry.stored_bytes)),
        "fingerprints": dict(Counter(entry.fingerprint.id for entry in entries)),
        "kept": {"entries": len(kept), "bytes": sum(kept), "max_bytes": store.quota.for_kept},
        "sources": sources,
    }
    table = Table()
    table.add_column("source", overflow="fold")
    for name in ("packs", "with KV", "tokens", "MB", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    more = sources[_MOST_ROWS:]
    for row in (*sources[:_MOST_ROWS], *([_summed(f"{len(more):,} more", more)] if more else ())):
        _add_row(table, row)
    table.add_section()
    _add_row(table, _summed("all", sources))
    kept_line = f"KV behind packs: {sum(kept) / 1e6:,.1f} MB kept, of at most {report['kept']['max_bytes'] / 1e6:,.0f}."
    made_for = ", ".join(report["fingerprints"]) or "none"
    return report, [f"Store: {path}", table, kept_line, f"Compiled for the models: {made_for}."]


def _summed(source: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row that sums up others."""
    sums = {count: sum(row[count] for row in rows) for count in _COUNTS}
    return {"source": source, **sums, "used": max((row["used"] or 0 for row in rows), default=0) or None}


def _add_row(table: Table, row: Mapping[str, Any]) -> None:
    *counts, nbytes = (row[count] for count in _COUNTS)
    table.add_row(row["source"], *(f"{count:,}" for count in counts), f"{nbytes / 1e6:,.1f}", _ago(row["used"]))


def _ago(moment: float | None) -> str:
    """How long ago it was, in the largest unit that fits."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds // size:.0f} {name} ago" for name, size in units if seconds >= size), "now")


@spread
def verify(
    path: TargetPath,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is wrong.")] = False,
    options: PlaceOptions,
    as_json: JsonFlag = False,
) -> None:
    """Check counts, a sample of vectors, banks, packs and KV kept behind packs. Names packs that no fact uses any more.
    Exit code 3 if something is wrong.
    """
    # This command reports what opening would log.
    logging.getLogger("kp_core").setLevel(logging.ERROR)
    if not is_collection(path) and not is_store(path):
        raise FactError(f"{path} is neither a collection nor a store of packs. {_HINT}")
    with waiting("Checking"):
        faults, orphans, packs = _check(path, options)
        left = faults
        if repair and faults:
            _repair(path, options, packs)
            left, orphans, _ = _check(path, options)
    lines = [f"✗ {fault}" for fault in faults]
    if orphans:
        unused = f"Packs that no fact uses any more: {', '.join(orphans)}"
        lines.insert(0, f"{unused}; `kp remove {shlex.quote(path)} --unused` removes them.")
    if not faults:
        lines.append("Nothing is wrong.")
    elif not repair:
        lines.append(f"`kp verify {shlex.quote(path)} --repair` repairs what it can.")
    else:
        lines.append(f"Not repaired: {len(left)}." if left else "All of it was repaired.")
    report = {"path": path, "wrong": faults, "repaired": repair and bool(faults), "left": left, "orphans": orphans}
    tell(report, "\n".join(lines), as_json=as_json)
    if left:
        raise typer.Exit(3)


def _check(path: str, options: PlaceOptions) -> tuple[list[str], list[str], str]:
    """Faults, packs that no fact uses any more, and the place of the packs."""
    faults, orphans, packs = list[str](), list[str](), path
    if is_collection(path):
        try:
            with options.open(path, read_only=True) as facts:
                packs, faults = options.folder(path, facts), list(facts.verify())
                with suppress(FactError):  # Raised if banks are not made yet: only they tell which packs are used.
                    if is_store(packs):
                        orphans = [str(handle) for handle in Delivery(facts, None, PackStore(packs)).orphans()]
        except FactError as error:
            if is_url(path) or isinstance(error, FactStoreLockedError):
                raise
            return [str(error)], orphans, str(Path(path) / "packs")
    if is_store(packs):
        for name, reason in PackStore(packs).verify():
            faults.append(f"{'KV behind packs,' if isinstance(name, str) else 'The pack'} {name}: {reason}")
    return faults, orphans, packs


def _repair(path: str, options: PlaceOptions, packs: str) -> None:
    """Repair a collection, and delete damaged KV, which is computed again. What is left, a second check tells."""
    if is_collection(path):
        try:
            with options.open(path) as facts:
                facts.verify(repair=True)
        except FactStoreLockedError:
            raise
        except FactError:  # Not even readable.
            return
    if is_store(packs):
        for _ in PackStore(packs).verify(repair=True):
            pass
