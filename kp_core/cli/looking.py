"""`kp inspect`, `kp verify`: what a bank, a store of packs or a pack file holds, and whether it can be trusted."""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from kp_core import PackStore
from kp_core.banks import ChromaFactBank
from kp_core.cli.plot import plot_banks
from kp_core.cli.shared import JsonFlag, WrongError, console, is_bank, open_bank, print_json
from kp_core.errors import BankError, PackError
from kp_core.pack import KnowledgePack
from kp_core.packdir import PackDirectory
from kp_core.packfile import read_pack

__all__ = ["inspect", "verify"]

_Target = Annotated[Path, typer.Argument(metavar="PATH", help="A bank, a store of packs, or a pack file.")]


def inspect(
    path: _Target,
    *,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the banks of a bank in two dimensions.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Sizes, calibration, fingerprints: what is in there."""
    if is_bank(path):
        with open_bank(path, read_only=True) as bank:
            about = _bank(bank)
            if plot is not None:
                plot_banks(bank, plot)
                about["plot"] = str(plot)
        if (path / "packs").is_dir():
            about["packs"] = _store(path / "packs")
    elif plot is not None:
        raise typer.BadParameter("--plot goes with a bank.")
    elif _is_store(path):
        about = _store(path)
    elif path.is_file():
        about = _pack(_read(path)) | {"file_bytes": path.stat().st_size}
    else:
        raise BankError(f"{path} is neither a bank, nor a store of packs, nor a pack file.")
    if as_json:
        print_json(about)
    else:
        _show(about)


def verify(
    path: _Target,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Put right what is wrong.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check journal, vectors, banks, Chroma and packs against their digests; exit code 3 when something is wrong."""
    # What opening logs, this says in its own words.
    logging.getLogger("kp_core").setLevel(logging.ERROR)
    bank, store = is_bank(path), path / "packs" if is_bank(path) else path
    if path.is_file():
        _read(path)
    elif not bank and not _is_store(store):
        raise BankError(f"{path} is neither a bank, nor a store of packs, nor a pack file.")
    found, left = _check_bank(path, repair=repair) if bank else ([], [])
    if _is_store(store):
        wrong = _verify_store(store)
        found += wrong
        left += _repair_store(store) if repair else wrong
    if as_json:
        print_json({"path": str(path), "wrong": found, "repaired": repair and bool(found), "left": left})
    else:
        out = console()
        for line in found:
            out.print(f"[red]✗[/red] {line}", soft_wrap=True)
        if repair and found and not left:
            out.print("All of it was put right.")
        elif not found:
            out.print("Nothing is wrong.")
        elif not repair:
            out.print(f"`kp verify {path} --repair` puts it right.")
    if left:
        raise WrongError


def _is_store(path: Path) -> bool:
    return (path / "packs").is_dir() and (path / "secret").exists()


def _check_bank(path: Path, *, repair: bool) -> tuple[list[str], list[str]]:
    """What is wrong with a bank, and what of it is left after the repair."""
    with open_bank(path, read_only=True) as bank:
        found = bank.verify()
    if not repair or not found:
        return found, list(found)
    with open_bank(path) as bank:
        bank.verify(repair=True)
        return found, bank.verify()


def _bank(bank: ChromaFactBank) -> dict[str, Any]:
    facts = list(bank.facts())
    sizes = [len(bank.bank_facts(number)) for number in range(bank.banks)]
    about = bank.calibration
    parts = bank.sizes
    count = max(1, len(facts))
    text = sum(len(fact.text.encode()) for fact in facts)
    return {
        "bank": str(bank.path),
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
    packs = [pack for pack in map(store.peek, store) if pack is not None]
    prints = Counter(pack.fingerprint.id for pack in packs)
    directory = PackDirectory(path)
    stored = sum(directory.header(handle).content.dtype is not None for handle in store)
    return {
        "store": str(path),
        "packs": len(packs),
        "with_kv": stored,
        "tokens": sum(len(pack.token_ids) for pack in packs),
        "bytes": store.nbytes,
        "fingerprints": dict(prints),
    }


def _pack(pack: KnowledgePack) -> dict[str, Any]:
    return {
        "text": pack.text,
        "namespace": pack.namespace,
        "tokens": len(pack.token_ids),
        "head_tokens": len(pack.head.token_ids),
        "kv_bytes": pack.nbytes,
        "fingerprint": pack.fingerprint.to_dict(),
        "provenance": dict(pack.provenance),
    }


def _read(path: Path) -> KnowledgePack:
    with io.FileIO(path) as file:
        return read_pack(file)


def _verify_store(path: Path) -> list[str]:
    directory, found = PackDirectory(path), list[str]()
    for handle in directory.handles(None):
        try:
            directory.read(handle)
        except (PackError, FileNotFoundError) as error:
            found.append(f"The pack {handle}: {error}")
    return found


def _repair_store(path: Path) -> list[str]:
    """Damaged packs come back lazy, from their text; what has no text is named."""
    store, left = PackStore(path), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for handle in store:
            try:
                store.get(handle)
            except PackError as error:
                left.append(f"The pack {handle}: {error}")
    return left


def _show(about: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for name, value in about.items():
        if isinstance(value, dict):
            shown = "\n".join(f"{key.replace('_', ' ')}: {_number(each)}" for key, each in value.items())
        else:
            shown = _number(value)
        table.add_row(name.replace("_", " "), shown)
    console().print(table)


def _number(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} ({_number(each)})" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
