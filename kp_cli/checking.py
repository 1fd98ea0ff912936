"""`kp inspect`, `kp verify`: show what a collection, a store or a pack file holds, and check it."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kp_cli.shared import (
    JsonFlag,
    ModelOptions,
    PlaceOptions,
    TargetPath,
    WrongError,
    is_collection,
    is_store,
    located,
    open_collection,
    spread,
    table_of,
    tell,
)
from kp_core import PackStore
from kp_core.bundled import needing
from kp_core.delivery import Delivery
from kp_core.engines.session import Session
from kp_core.errors import FactError, FactStoreLockedError, KnowledgePackError, PackError
from kp_core.facts import ChromaFactStore
from kp_core.facts.client import is_url
from kp_core.packs.file import read_pack
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack

__all__ = ["inspect", "verify"]

_QUESTION = "What is known about this?"


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
            report = _about_collection(facts)
            folder = options.folder(path, facts)
        if is_store(folder):
            report["packs"] = _about_store(folder)
    elif is_store(target):
        report = _about_store(target)
    else:
        file = _pack_file(path)
        report = _about_pack(_read(file)) | {"file_bytes": file.stat().st_size}
    if plot is not None:
        if not is_store(folder):
            raise FactError(f"Got --plot for {path}, which holds no packs; `kp ask` makes some.")
        _draw(PackStore(folder), plot)
    tell(report, table_of(report), as_json=as_json)


@dataclass
class _Report:
    """The faults that were found, and those left after the repair, one sentence each.

    `orphans` are packs that no fact uses any more. `packs` counts those `checked` against the model's template and
    those of an `other_model`.
    """

    found: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    packs: Counter[str] = field(default_factory=Counter)

    def add(self, found: list[str], left: list[str] | None = None) -> None:
        """Add faults; by default all of them are left."""
        self.found += found
        self.left += found if left is None else left


@spread
def verify(  # noqa: PLR0913 - one parameter per option or group of options
    path: TargetPath,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is wrong.")] = False,
    template: Annotated[
        bool, typer.Option("--template/--no-template", help="Check packs against the model's chat template, too.")
    ] = True,
    options: PlaceOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Check counts, a sample of vectors, banks and packs, and that a prompt with a pack's handle is byte for byte that
    with its text; exit code 3 when something is wrong. Packs that no fact uses any more are named.
    """
    # This command reports what opening would log.
    logging.getLogger("kp_core").setLevel(logging.ERROR)
    report, packs = _Report(), located(path)
    if is_collection(path):
        packs = _check_collection(path, options, report, repair=repair)
    if is_store(packs):
        store = PackStore(packs)
        _check_store(store, report, repair=repair)
        if template and len(store):
            _check_template(model.load(), store, report)
    elif not is_collection(path):
        try:
            _read(_pack_file(path))
        except PackError as error:
            report.add([str(error)])
    data = {"path": path, "wrong": report.found, "repaired": repair and bool(report.found), "left": report.left}
    data |= {"template": {name: report.packs[name] for name in ("checked", "other_model")}}
    tell({**data, "orphans": report.orphans}, _told(path, report, repair=repair), as_json=as_json)
    if report.left:
        raise WrongError


def _told(path: str, report: _Report, *, repair: bool) -> Text:
    """A report as text for people."""
    message, faults, unrepaired = Text(), report.found, report.left
    if report.orphans:
        message.append(f"Packs that no fact uses any more: {', '.join(report.orphans)}; `kp gc {path}` removes them.\n")
    if checked_count := report.packs["checked"]:
        message.append(f"Packs that a prompt was rendered with, by handle and by text: {checked_count}.\n")
    if other_models := report.packs["other_model"]:
        message.append(
            f"Packs of another model, whose template was not checked: {other_models}; name it with --model.\n"
        )
    for line in faults:
        message.append("✗", "red").append(f" {line}\n")
    if repair and unrepaired:
        return message.append(f"Not repaired: {len(unrepaired)}.")
    if repair and faults:
        return message.append("All of it was repaired.")
    return message.append(f"`kp verify {path} --repair` repairs what it can." if faults else "Nothing is wrong.")


def _check_collection(path: str, options: PlaceOptions, report: _Report, *, repair: bool) -> str | Path:
    """Report the faults of a collection and its unused packs. Returns the place of its packs."""
    try:
        with open_collection(path, options, read_only=True) as facts:
            packs, faults = options.folder(path, facts), facts.verify()
            with suppress(FactError):  # Raised if banks are not made yet: only they tell which of their packs are used.
                store = PackStore(packs) if is_store(packs) else None
                report.orphans = [str(h) for h in Delivery(facts, None, store).orphans()] if store else []
    except FactError as error:
        if is_url(path) or isinstance(error, FactStoreLockedError):
            raise
        report.add([str(error)])
        return Path(path) / "packs"
    unrepaired = faults
    if repair and faults:
        with open_collection(path, options) as facts:
            facts.verify(repair=True)
            unrepaired = facts.verify()
    report.add(faults, unrepaired)
    return packs


def _check_store(store: PackStore, report: _Report, *, repair: bool) -> None:
    """Report damaged packs. A repair makes them lazy, from their text; packs without text are left."""
    for handle, reason in list(store.verify()):
        unrepaired = [f"The pack {handle}: {reason}"]
        if repair:
            try:
                store.get(handle)
                unrepaired = []
            except PackError as error:
                unrepaired = [f"The pack {handle}: {error}"]
        report.add([f"The pack {handle}: {reason}"], unrepaired)


def _check_template(session: Session, store: PackStore, report: _Report) -> None:
    """Render a question behind each pack's handle and behind its text; bytes and tokens must be the same.

    Packs of a model with another tokenizer or chat template are counted, but not checked.
    """
    expected = session.fingerprint
    for handle in store:
        pack = store.peek(handle)
        if pack is None:
            continue
        fingerprint = pack.fingerprint
        if (fingerprint.tokenizer, fingerprint.chat_template) != (expected.tokenizer, expected.chat_template):
            report.packs["other_model"] += 1
            continue
        report.packs["checked"] += 1
        try:
            reason = _difference(session, store, handle, pack)
        except KnowledgePackError as error:
            reason = str(error)
        if reason:
            report.add([f"The pack {handle}: {reason}"])


def _difference(session: Session, store: PackStore, handle: Handle, pack: KnowledgePack) -> str | None:
    template, view = session.template, store.view(handle.namespace)
    prompt = template.render(f"{handle}\n\n{_QUESTION}", view=view)
    text_prompt = template.render(f"{pack.text}\n\n{_QUESTION}")
    if prompt.rendered.encode() != text_prompt.rendered.encode():
        return "a prompt with its handle is rendered differently from one with its text."
    if prompt.token_ids != text_prompt.token_ids:
        return "a prompt with its handle has other tokens than one with its text."
    # The last tokens of a pack for the system message differ from those in a user message.
    for rendered in (prompt, template.render(f"{handle}\n\n{_QUESTION}", view=view, placement="system")):
        template.verify(rendered)
        if any(rendered.token_ids[span.start : span.stop] == pack.token_ids for span in rendered.spans):
            return None
    return "its tokens are those of its text at no position of the template; it is computed again wherever it is used."


def _pack_file(path: str) -> Path:
    """The path of a pack file. Raises `FactError` if it is nothing of ours."""
    file = located(path)
    if not isinstance(file, Path) or not file.is_file():
        raise FactError(f"{path} is neither a collection, nor a store of packs, nor a pack file.")
    return file


def _read(file: Path) -> KnowledgePack:
    """The pack in a file. Raises `PackError` with the file's name if it is not a pack or damaged."""
    try:
        return read_pack(file.read_bytes())
    except PackError as error:
        raise PackError(f"{file} is no pack file, or damaged: {error}") from error


def _draw(store: PackStore, picture: Path) -> None:
    """Plot `store`: tokens per pack, and the bytes of texts, of packs' KV and of kept KV."""
    with needing("--plot needs matplotlib", "plot"):
        from matplotlib.figure import Figure
    entries = [entry for handle in store for entry in store.entries(handle)]
    kv, kept_bytes = sum(entry.stored_bytes for entry in entries), store.kept.nbytes
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    tokens, disk = figure.subplots(1, 2)
    tokens.hist([len(entry.token_ids) for entry in entries], bins=20, color="#0072b2")
    tokens.set(xlabel="tokens", ylabel="packs")
    names = ("text and tokens", "KV of packs", "kept behind packs")
    disk.barh(names, [size / 1e6 for size in (store.nbytes - kv, kv, kept_bytes)], color="#d95f02")
    disk.set(xlabel="MB on disk")
    try:
        figure.savefig(picture)
    except ValueError as error:
        raise FactError(f"Got --plot {picture}; expected a name that ends in .png or .svg ({error}).") from error


def _about_collection(store: ChromaFactStore) -> dict[str, Any]:
    facts, banks = list(store.facts()), None
    with suppress(FactError):  # Raised if banks are not made yet, as this only reads.
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


def _about_store(path: str | Path) -> dict[str, Any]:
    store = PackStore(path)
    entries = [entry for handle in store for entry in store.entries(handle)]
    kept_entries = list(store.kept)
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
            "entries": len(kept_entries),
            "tokens": sum(len(entry.token_ids) for entry in kept_entries),
            "bytes": store.kept.nbytes,
        },
    }


def _about_pack(pack: KnowledgePack) -> dict[str, Any]:
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
