"""`kp verify`: whether a collection, a store of packs or a pack file can be trusted."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kp_core import PackStore
from kp_core.cli.shared import (
    JsonFlag,
    ModelOptions,
    TargetPath,
    WrongError,
    console,
    is_collection,
    is_store,
    open_collection,
    print_json,
    read_one,
    spread,
)
from kp_core.engines.session import Session
from kp_core.errors import BankError, KnowledgePackError, PackError
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack

__all__ = ["verify"]

_QUESTION = "What is known about this?"


@spread
def verify(
    path: TargetPath,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is wrong.")] = False,
    template: Annotated[
        bool, typer.Option("--template/--no-template", help="Check packs against the model's chat template, too.")
    ] = True,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Check journal, vectors, banks, Chroma and packs against their digests, and that a prompt with a pack's handle is
    byte for byte that with its text; exit code 3 when something is wrong.
    """
    # What opening logs, this says in its own words.
    logging.getLogger("kp_core").setLevel(logging.ERROR)
    store = path / "packs" if is_collection(path) else path
    found, left = _check_files(path, store, repair=repair)
    counts = Counter[str]()
    if template and is_store(store) and next(iter(PackStore(store)), None):
        counts, wrong = _check_template(model.load(), PackStore(store))
        found += wrong
        left += wrong
    if as_json:
        packs = {name: counts[name] for name in ("checked", "other_model")}
        about = {"wrong": found, "repaired": repair and bool(found), "left": left, "template": packs}
        print_json({"path": str(path), **about})
    else:
        _tell(path, found, left, counts, repair=repair)
    if left:
        raise WrongError


def _tell(path: Path, found: list[str], left: list[str], counts: Counter[str], *, repair: bool) -> None:
    out = console()
    if counts["checked"]:
        out.print(f"Packs that a prompt was rendered with, by handle and by text: {counts['checked']}.")
    if others := counts["other_model"]:
        out.print(f"Packs of another model, whose template was not checked: {others}; name it with --model.")
    for line in found:
        out.print(Text.assemble(("✗", "red"), f" {line}"), soft_wrap=True)
    if repair and found and not left:
        out.print("All of it was repaired.")
    elif repair and left:
        out.print(f"Not repaired: {len(left)}.")
    elif not found:
        out.print("Nothing is wrong.")
    else:
        out.print(f"`kp verify {path} --repair` repairs what it can.")


def _check_template(session: Session, store: PackStore) -> tuple[Counter[str], list[str]]:
    """Render a question behind the handle of each pack and behind its text: the same bytes, the same tokens.

    How many were `checked` and how many are of an `other_model`, by its tokenizer or chat template, which are not
    judged; and what is wrong, a sentence each.
    """
    counts, wrong, own = Counter[str](), list[str](), session.fingerprint
    for handle in store:
        pack = store.peek(handle)
        if pack is None:
            continue
        made = pack.fingerprint
        if (made.tokenizer, made.chat_template) != (own.tokenizer, own.chat_template):
            counts["other_model"] += 1
            continue
        counts["checked"] += 1
        try:
            reason = _difference(session, store, handle, pack)
        except KnowledgePackError as error:
            reason = str(error)
        if reason:
            wrong.append(f"The pack {handle}: {reason}")
    return counts, wrong


def _difference(session: Session, store: PackStore, handle: Handle, pack: KnowledgePack) -> str | None:
    template, view = session.template, store.view(handle.namespace)
    prompt = template.render(f"{handle}\n\n{_QUESTION}", view=view)
    twin = template.render(f"{pack.text}\n\n{_QUESTION}")
    if prompt.rendered.encode() != twin.rendered.encode():
        return "a prompt with its handle is rendered differently from one with its text."
    if prompt.token_ids != twin.token_ids:
        return "a prompt with its handle has other tokens than one with its text."
    # One made for the system message ends differently than it would in a user's.
    for placed in (prompt, template.render(f"{handle}\n\n{_QUESTION}", view=view, placement="system")):
        template.verify(placed)
        if any(placed.token_ids[span.start : span.stop] == pack.token_ids for span in placed.spans):
            return None
    return "its tokens are those of its text at no position of the template; it is computed again wherever it is used."


def _check_files(path: Path, store: Path, *, repair: bool) -> tuple[list[str], list[str]]:
    """What is wrong with a collection, a store or a pack file, and what of it is left after the repair."""
    if path.is_file():
        try:
            read_one(path)
        except PackError as error:
            return [str(error)], [str(error)]
        return [], []
    if not is_collection(path) and not is_store(store):
        raise BankError(f"{path} is neither a collection, nor a store of packs, nor a pack file.")
    found, left = _check_collection(path, repair=repair) if is_collection(path) else ([], [])
    if is_store(store):
        wrong = [f"The pack {handle}: {reason}" for handle, reason in PackStore(store).verify()]
        found += wrong
        left += _repair_store(store) if repair else wrong
    return found, left


def _check_collection(path: Path, *, repair: bool) -> tuple[list[str], list[str]]:
    """What is wrong with a collection, and what of it is left after the repair."""
    with open_collection(path, read_only=True) as facts:
        found = facts.verify()
    if not repair or not found:
        return found, list(found)
    with open_collection(path) as facts:
        facts.verify(repair=True)
        return found, facts.verify()


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
