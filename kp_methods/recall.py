"""Finds again what left a conversation: facts whose handles it has met, chosen by the model's attention."""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kp_core import Handle, Session
from kp_core.banks.base import Fact, content_id
from kp_core.banks.compiling import DOCUMENT
from kp_core.banks.delivery import Delivery
from kp_core.banks.store import FactStore
from kp_core.errors import KnowledgePackError, PackNotFoundError
from kp_core.events import warn_once
from kp_core.packs.view import PackRef, Packs, PackView
from kp_core.plan.composer import composer_of
from kp_core.prompt.conversation import GAP, Turn
from kp_methods.select import selector_of

logger = logging.getLogger(__name__)
_NEAREST, _MOST = 20, 2
_ABOUT = 0.1
"""Attention times similarity from which on a question is about a pack. Of 39 questions about one of five facts or
passages, 39 had more on the bundled model, and of 39 about none of them 2."""
_MET = 10_000  # Handles among which is searched; SQLite, and so Chroma, takes 32,766 values.


def recalled(  # noqa: PLR0913 - where to look, and for what
    question: str, handles: Iterable[Handle], facts: FactStore, session: Session, view: PackView, *, room: int
) -> list[PackRef]:
    """At most two packs of `handles` that `question` is about, with at most `room` tokens, the best one last.

    Of many handles, the last 10,000 count. Each is searched in its own namespace of `facts`; documents of the caller's
    own store, which are in no fact store, are embedded in memory. Of the 20 nearest, `select` chooses, and none if the
    question attends to none of them. Where it cannot (no KV, or an engine without attention), they are the nearest.
    Packs are left out that `view` may not read, that are deleted, that the model may not use, or that are of no fact or
    document; if all are of none, a warning says so.
    """
    view = replace(view, model=session.fingerprint)
    digests, documents = defaultdict[str, dict[str, Handle]](dict), list[Handle]()
    for handle in [handle for handle in handles if handle.namespace in view.namespaces][-_MET:]:
        with suppress(KnowledgePackError):  # It is deleted, or its text is damaged.
            digest, is_document = _about(view.source, handle)
            digests[handle.namespace][digest] = handle
            documents += [handle] if is_document else []
    hits = [
        (float(hit.score), digests[space][hit.fact.digest])
        for space in sorted(digests.keys() & set(facts.namespaces()))
        for hit in facts.search(question, _NEAREST, where={"kp:digest": {"$in": [*digests[space]]}}, namespace=space)
    ]
    if documents:
        asked = facts.embedder.embed_query(question)
        hits += [(float(_vector(facts, view.source, handle) @ asked), handle) for handle in documents]
    if digests and not hits:
        warn_once(
            logger,
            "Packs left a conversation, and none of them is of a fact in `facts`, so that none is found again. Give "
            "`memory='search'` the store of the facts that the tools find.",
        )
    near: dict[Handle, PackRef] = {}
    scores = {handle: score for score, handle in sorted(hits, key=lambda hit: hit[0])}  # The best of each.
    for handle in sorted(scores, key=scores.__getitem__, reverse=True)[:_NEAREST]:
        with suppress(KnowledgePackError):  # Of another model.
            if (pack := view.peek(handle)) is not None:
                near[handle] = PackRef(str(handle), pack)
    chosen = list(near.values())
    similar = [scores[handle] for handle in near]
    host = replace(session.host, view=view)
    if chosen and "attention" in session.supports:
        attention = selector_of(host).attention(chosen, question, view)
        if attention and max(map(operator.mul, attention, similar)) < _ABOUT:
            return []
    if len(chosen) > 1 and "attention" in session.supports:
        parts = [part for pack in chosen for part in (pack, GAP)]
        turn = Turn("user", (*parts, question))
        [turn] = composer_of(f"select:packs={_MOST}").arrange([turn], host).turns
        selected = [part for part in turn.segments if isinstance(part, PackRef)]
        chosen = selected[::-1] if len(selected) <= _MOST else chosen
    sizes = accumulate(len(session.tokenizer.encode(pack.text, add_special_tokens=False)) for pack in chosen[:_MOST])
    return [pack for pack, size in zip(chosen, sizes, strict=False) if size <= room][::-1]


@lru_cache(2 * _MET)
def _about(store: Packs, handle: Handle) -> tuple[str, bool]:
    """The digest of a pack's text, by which its fact is found, and whether it is of a document; read once.

    Raises `PackNotFoundError`.
    """
    if (pack := store.peek(handle)) is None:
        raise PackNotFoundError(f"{store!r} has no pack {handle}.")
    return content_id(pack.text), pack.provenance.get("of") == DOCUMENT


@lru_cache(_MET)
def _vector(facts: FactStore, store: Packs, handle: Handle) -> NDArray[np.float32]:
    """The vector of a pack's text, embedded once in a process."""
    pack = store.peek(handle)
    [vector] = np.asarray(facts.embedder.embed([pack.text if pack else " "]), np.float32)
    return np.asarray(vector)


def remember(texts: Iterable[str], facts: FactStore, session: Session, store: Packs, namespace: str) -> list[Handle]:
    """Store texts of no fact as facts of the conversation's `namespace`, with their packs; returns their handles."""
    texts = list(texts)
    if texts:
        Delivery(facts, session, store, namespace=namespace).add([Fact(text) for text in texts], progress=False)
    return [store.handle(text, namespace) for text in texts]
