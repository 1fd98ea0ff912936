"""`kp inspect`: what a collection, a store of packs or a pack file holds."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kp_core import PackStore
from kp_core.bundled import needing
from kp_core.cli.places import PlaceOptions, is_collection, open_collection
from kp_core.cli.shared import JsonFlag, TargetPath, is_store, located, print_json, read_one, show_table, spread
from kp_core.errors import FactError
from kp_core.facts import ChromaFactStore
from kp_core.packs.pack import KnowledgePack

__all__ = ["inspect"]


@spread
def inspect(
    path: TargetPath,
    *,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PICTURE", help="Draw how long packs are and what takes the disk: .png or .svg."),
    ] = None,
    options: PlaceOptions,
    as_json: JsonFlag = False,
) -> None:
    """Facts, namespaces, embedder, banks, sizes, fingerprints: what is in there."""
    target = folder = located(path)
    if is_collection(path):
        with open_collection(path, options, read_only=True) as facts:
            about = _collection(facts)
            folder = options.folder(path, facts)
        if is_store(folder):
            about["packs"] = _store(folder)
    elif is_store(target):
        about = _store(target)
    elif isinstance(target, Path) and target.is_file():
        about = _pack(read_one(target)) | {"file_bytes": target.stat().st_size}
    else:
        raise FactError(f"{path} is neither a collection, nor a store of packs, nor a pack file.")
    if plot is not None:
        if not is_store(folder):
            raise FactError(f"Got --plot for {path}, which holds no packs; `kp ask` makes some.")
        _draw(PackStore(folder), plot)
    if as_json:
        print_json(about)
    else:
        show_table(about)


def _draw(store: PackStore, picture: Path) -> None:
    """Draw `store`: how many packs have how many tokens, and the bytes of texts, of packs' KV and of what is kept."""
    with needing("--plot needs matplotlib", "plot"):
        from matplotlib.figure import Figure
    entries = [entry for handle in store for entry in store.entries(handle)]
    kv, kept = sum(entry.stored_bytes for entry in entries), store.kept.nbytes
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    tokens, disk = figure.subplots(1, 2)
    tokens.hist([len(entry.token_ids) for entry in entries], bins=20, color="#0072b2")
    tokens.set(xlabel="tokens", ylabel="packs")
    names = ("text and tokens", "KV of packs", "kept behind packs")
    disk.barh(names, [size / 1e6 for size in (store.nbytes - kv, kv, kept)], color="#d95f02")
    disk.set(xlabel="MB on disk")
    try:
        figure.savefig(picture)
    except ValueError as error:
        raise FactError(f"Got --plot {picture}; expected a name that ends in .png or .svg ({error}).") from error


def _collection(store: ChromaFactStore) -> dict[str, Any]:
    facts, banks = list(store.facts()), None
    with suppress(FactError):  # Raised where banks are still to be made, as this only reads.
        banks = len(store.banks())
    return {
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


def _store(path: str | Path) -> dict[str, Any]:
    store = PackStore(path)
    entries = [entry for handle in store for entry in store.entries(handle)]
    kept = list(store.kept)
    return {
        "store": str(path),
        "packs": len(store),
        "entries": len(entries),
        "with_kv": sum(entry.stored_bytes > 0 for entry in entries),
        "tokens": sum(len(entry.token_ids) for entry in entries),
        "bytes": store.nbytes,
        "compression": dict(Counter(entry.compression for entry in entries if entry.stored_bytes)),
        "fingerprints": dict(Counter(entry.fingerprint.id for entry in entries)),
        "kept": {
            "entries": len(kept),
            "tokens": sum(entry.tokens for entry in kept),
            "bytes": store.kept.nbytes,
        },
    }


def _pack(pack: KnowledgePack) -> dict[str, Any]:
    return {
        "text": pack.text,
        "namespace": pack.namespace,
        "tokens": len(pack.token_ids),
        "prefix_tokens": len(pack.prefix.token_ids),
        "kv_bytes": pack.nbytes,
        "compression": pack.compression,
        "fingerprint": pack.fingerprint.to_dict(),
        "provenance": dict(pack.provenance),
    }
