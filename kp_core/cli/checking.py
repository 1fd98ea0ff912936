"""`kp verify`: whether a collection, a store of packs or a pack file can be trusted."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kp_core import PackStore
from kp_core.cli.places import PlaceOptions, is_collection, open_collection
from kp_core.cli.shared import (
    JsonFlag,
    ModelOptions,
    TargetPath,
    WrongError,
    console,
    is_store,
    located,
    print_json,
    read_one,
    spread,
)
from kp_core.delivery import Delivery
from kp_core.engines.session import Session
from kp_core.errors import FactError, FactStoreLockedError, KnowledgePackError, PackError
from kp_core.facts.client import is_url
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack

__all__ = ["verify"]

_QUESTION = "What is known about this?"


@dataclass
class _Seen:
    """Where the packs are; what was found, and what of it is left after the repair, a sentence each; unused packs."""

    packs: str | Path
    found: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    def add(self, found: list[str], left: list[str]) -> None:
        self.found += found
        self.left += left


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
    # What opening logs, this says in its own words.
    logging.getLogger("kp_core").setLevel(logging.ERROR)
    seen = _check_collection(path, options, repair=repair) if is_collection(path) else _Seen(located(path))
    store, found, left = seen.packs, seen.found, seen.left
    _check_packs(path, seen, repair=repair)
    counts = Counter[str]()
    if template and is_store(store) and next(iter(PackStore(store)), None):
        counts, wrong = _check_template(model.load(), PackStore(store))
        found += wrong
        left += wrong
    if as_json:
        packs = {name: counts[name] for name in ("checked", "other_model")}
        about = {"wrong": found, "repaired": repair and bool(found), "left": left, "template": packs}
        print_json({"path": path, **about, "orphans": seen.orphans})
    else:
        _tell(path, seen, counts, repair=repair)
    if left:
        raise WrongError


def _tell(path: str, seen: _Seen, counts: Counter[str], *, repair: bool) -> None:
    out, found, left = console(), seen.found, seen.left
    if seen.orphans:
        out.print(f"Packs that no fact uses any more: {', '.join(seen.orphans)}; `kp gc {path}` removes them.")
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


def _check_packs(path: str, seen: _Seen, *, repair: bool) -> None:
    """Add what is wrong with the packs of a collection or store, or with a pack file."""
    if isinstance(seen.packs, Path) and seen.packs.is_file():
        try:
            read_one(seen.packs)
        except PackError as error:
            seen.add([str(error)], [str(error)])
    elif is_store(seen.packs):
        wrong = [f"The pack {handle}: {reason}" for handle, reason in PackStore(seen.packs).verify()]
        seen.add(wrong, _repair_store(seen.packs) if repair else wrong)
    elif not is_collection(path):
        raise FactError(f"{path} is neither a collection, nor a store of packs, nor a pack file.")


def _check_collection(path: str, options: PlaceOptions, *, repair: bool) -> _Seen:
    seen = _Seen(Path(path) / "packs")
    try:
        with open_collection(path, options, read_only=True) as facts:
            seen.packs, wrong = options.folder(path, facts), facts.verify()
            with suppress(FactError):  # Banks may still have to be made, to know which of their packs are used.
                store = PackStore(seen.packs) if is_store(seen.packs) else None
                seen.orphans = [str(h) for h in Delivery(facts, None, store).orphans()] if store else []
    except FactError as error:
        if is_url(path) or isinstance(error, FactStoreLockedError):
            raise
        seen.add([str(error)], [str(error)])
        return seen
    left = wrong
    if repair and wrong:
        with open_collection(path, options) as facts:
            facts.verify(repair=True)
            left = facts.verify()
    seen.add(wrong, left)
    return seen


def _repair_store(path: str | Path) -> list[str]:
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
