"""`kp inspect`: what a collection, a store of packs or a pack file holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kp_core import PackStore
from kp_core.cli.shared import (
    JsonFlag,
    TargetPath,
    is_collection,
    is_store,
    open_collection,
    print_json,
    read_one,
    show_table,
)
from kp_core.errors import BankError
from kp_core.facts import ChromaFactBank
from kp_core.packs.pack import KnowledgePack

__all__ = ["inspect"]

_SHOWN = 5  # Entries that were used most.


def inspect(path: TargetPath, *, as_json: JsonFlag = False) -> None:
    """Sizes, calibration, fingerprints: what is in there."""
    if is_collection(path):
        with open_collection(path, read_only=True) as facts:
            about = _collection(facts)
        if (path / "packs").is_dir():
            about["packs"] = _store(path / "packs")
    elif is_store(path):
        about = _store(path)
    elif path.is_file():
        about = _pack(read_one(path)) | {"file_bytes": path.stat().st_size}
    else:
        raise BankError(f"{path} is neither a collection, nor a store of packs, nor a pack file.")
    if as_json:
        print_json(about)
    else:
        show_table(about)


def _collection(bank: ChromaFactBank) -> dict[str, Any]:
    facts = list(bank.facts())
    sizes = [len(bank.bank_facts(number)) for number in range(bank.banks)]
    about = bank.calibration
    parts = bank.sizes
    count = max(1, len(facts))
    text = sum(len(fact.text.encode()) for fact in facts)
    return {
        "collection": str(bank.path),
        "facts": len(facts),
        "banks": bank.banks,
        "facts_per_bank": dict(zip(("least", "median", "most"), _spread(sizes), strict=True)),
        "embedder": bank.embedder.name,
        "namespaces": dict(Counter(fact.namespace for fact in facts)),
        "sources": len({fact.source for fact in facts}),
        "updated": sum(fact.version > 1 for fact in facts),
        "expiring": sum(fact.expires is not None for fact in facts),
        "bytes": parts,
        "bytes_per_fact": {name: round(size / count, 1) for name, size in ({"text": text} | parts).items()},
        "torn_bytes": bank.torn_bytes,
        "calibration": asdict(about) | {"probes_now": about.probes_of(bank.banks)} if about else None,
    }


def _spread(sizes: list[int]) -> list[int]:
    return [int(value) for value in np.quantile(sizes, [0, 0.5, 1])] if sizes else [0, 0, 0]


def _store(path: Path) -> dict[str, Any]:
    store = PackStore(path)
    entries = [entry for handle in store for entry in store.entries(handle)]
    kept, hits = list(store.kept), store.hits
    used = sorted(kept, key=lambda entry: -entry.hits)[:_SHOWN]
    return {
        "store": str(path),
        "packs": len(store),
        "entries": len(entries),
        "with_kv": sum(entry.stored_bytes > 0 for entry in entries),
        "tokens": sum(len(entry.token_ids) for entry in entries),
        "bytes": store.nbytes,
        "compression": dict(Counter(entry.compression for entry in entries if entry.stored_bytes)),
        "fingerprints": dict(Counter(entry.fingerprint.id for entry in entries)),
        "hits": sum(count for name, count in hits.items() if name.startswith("kp:")),
        "kept": {
            "entries": len(kept),
            "tokens": sum(entry.tokens for entry in kept),
            "bytes": store.kept.nbytes,
            "hits": sum(entry.hits for entry in kept),
            "most_used": [
                {"hits": each.hits, "tokens": each.tokens, "behind": list(each.packs)} for each in used if each.hits
            ],
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
