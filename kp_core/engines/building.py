"""From texts to packs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kp_core.engines.base import Engine
from kp_core.engines.request import CompiledFor
from kp_core.errors import ContextOverflowError, PromptError, ShortTextError
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.plan import Plan
from kp_core.prompt.template import ChatTemplate, TokenisedPack

__all__ = ["Job", "built", "stored", "tokenised"]

Job = tuple[TokenisedPack, Mapping[str, str]]
"""A text as tokens at the position it is compiled for, and what else is known of it."""


def tokenised(
    template: ChatTemplate,
    texts: Iterable[tuple[str, Mapping[str, str]]],
    compiled_for: CompiledFor,
    on_short: Callable[[str, PromptError], object] | None,
    most: int | None,
) -> Iterator[Job]:
    """The jobs of `texts`; one too short to own a token, or of more than `most`, goes to `on_short`, or is an error."""
    for text, about in texts:
        try:
            yield template.tokenise_pack(text, compiled_for, most=most), about
        except (ShortTextError, ContextOverflowError) as error:
            if on_short is None:
                raise
            on_short(text, error)


def built(  # noqa: PLR0913 - what a pack is made of
    jobs: Iterable[Job],
    engine: Engine,
    wanted: Callable[[Prefix, Sequence[int], str], Plan],
    namespace: str,
    made: Mapping[str, str],
    *,
    lazy: bool,
) -> Iterator[KnowledgePack]:
    """The packs of `jobs`, in order, as `engine` computes their KV; `made` goes into the provenance of each."""
    waiting: deque[tuple[TokenisedPack, Prefix, Mapping[str, str]]] = deque()

    def plans() -> Iterator[Plan]:
        for job, about in jobs:
            prefix = job.prompt.prefix_of(job.prompt.spans[0])
            waiting.append((job, prefix, about))
            yield wanted(prefix, job.token_ids, namespace)

    for kv in (None for _ in plans()) if lazy else engine.kv(plans()):
        job, prefix, about = waiting.popleft()
        provenance = {**made, **about}
        yield KnowledgePack(job.text, namespace, job.token_ids, prefix, engine.identity, kv, provenance)


def stored(pack: KnowledgePack, engine: Engine, plan: Plan, put: Callable[[KnowledgePack], object]) -> Iterator[None]:
    """The steps of background work that gives `pack` the KV which `plan` wants, and puts it away."""
    for kv in engine.kv([plan]):
        put(replace(pack, kv=kv))
        yield
