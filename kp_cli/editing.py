"""`kp edit`: a statement of a fact, or of a pack, corrected."""

from __future__ import annotations

from typing import Annotated

import typer

from kp_cli.knowledge import found_id
from kp_cli.places import PlaceOptions, open_collection
from kp_cli.shared import JsonFlag, ModelOptions, TargetPath, is_store, located, spread, tell
from kp_core import edit as editing
from kp_core.delivery import Delivery
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.store import PackStore

__all__ = ["edit"]


@spread
def edit(  # noqa: PLR0913 - one parameter per option or group of options
    place: TargetPath,
    name: Annotated[str, typer.Argument(metavar="ID", help="The id of a fact, or how it begins; or a handle.")],
    *,
    old: Annotated[str, typer.Option(help="What it says, letter by letter, and says once.")],
    new: Annotated[str, typer.Option(help="What holds instead.")],
    how: Annotated[
        editing.How,
        typer.Option(help="A line behind it that corrects it; its KV alone, approximate; or all of it computed anew."),
    ] = "amend",
    options: PlaceOptions,
    model: ModelOptions,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for another writer.")] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Correct what a fact of a collection says, or a pack of a store; the old pack stays under its own handle."""
    if is_store(located(place)):
        store, handle, session = PackStore(place), Handle.parse(name), model.load()
        was = store.get(handle, PackKey(session.fingerprint))
        made = editing.edit(was, old, new, session, how=how)
        _say(handle, store.put(made), made, as_json=as_json)
        return
    with open_collection(place, options, wait=wait) as opened:
        fact = opened.get(found_id(name, opened))
        session, store = model.load(), PackStore(options.folder(place, opened))
        delivery = Delivery(opened, session, store, kv="stored", namespace=fact.namespace)
        edited = delivery.edit(fact.id, old, new, how=how)
        before, after = (store.handle(each.text, each.namespace) for each in (fact, edited))
        found = store.peek(after, PackKey(session.fingerprint))
        if found is not None:
            _say(before, after, found, as_json=as_json)


def _say(before: Handle, after: Handle, pack: KnowledgePack, *, as_json: bool) -> None:
    errata = [each.line for each in pack.edits.corrections]
    about = {"handle": str(after), "was": str(before), "tokens": len(pack.token_ids), "errata": errata}
    about |= {"text": pack.text, "how": pack.history[-1].how}
    said = "\n".join(errata) or f"It says now: {pack.text}"
    tell(about, f"{after} in place of {before}: {len(pack.token_ids)} tokens.\n{said}", as_json=as_json)
