"""Which KV of a prompt is altered: as a client names it, as the server signs it, and as it lies in the store."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from kp_core.errors import PromptError, SteeringError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.packs.kept import EntryKey
from kp_core.plan import Plan, Region
from kp_core.steering import Steering
from kp_core.steering.file import steering_bytes, steering_of

__all__ = ["COMPUTED", "Altered", "Below", "asked", "digest_of"]

COMPUTED = "kp-computed-tokens"
"""The header of an answer that says how many tokens were computed before its prompt could be steered."""

_BEFORE = "below a steered block"  # How `EntryKey.before` of such entries begins.
_MOST_BLOCKS = 64
_MOST_BYTES = 8 * 2**20  # Of all steerings of a request; one of an 8B model has some 50 kB.


@dataclass(frozen=True)
class Altered:
    """Blocks of one prompt that are steered, in order, as steered regions of a plan are.

    A block is computed as if nothing in it were steered, and then altered; what follows sees the altered KV. A server
    computes no token twice in one pass, so it takes one request for each block: that computes up to the block's end
    behind the blocks before it, and is kept (`Below`); the next request loads this, alters it, and goes on.
    """

    blocks: tuple[tuple[int, int, tuple[tuple[int, int, str], ...]], ...]
    """Start and stop of each block, and of each of its parts, with the id of the steering."""
    steerings: Mapping[str, str]
    """By their ids, as files in base64."""
    packs: tuple[tuple[str, int], ...] = ()
    """Handles of packs in the prompt, and where they begin: with a pack goes what was kept of it."""
    tokens: str = ""
    """`digest_of` the prompt's token ids."""
    keep: bool = False
    """Whether the KV of this whole prompt is to be kept, plain as it is behind the blocks."""

    @classmethod
    def of(cls, said: object, token_ids: object, model: ModelFingerprint) -> Altered:
        """What a client asks for; raises `PromptError` and `SteeringError`, which say what is wrong with it."""
        if not isinstance(token_ids, list) or not all(type(each) is int and each >= 0 for each in token_ids):
            raise PromptError(
                "Got 'kp' with a prompt that is not one list of token ids; steered blocks are placed by them."
            )
        if not isinstance(said, Mapping) or set(said) - {"blocks", "steerings", "packs"}:
            raise PromptError("Expected 'kp': {'blocks': …, 'steerings': …, 'packs': …}, as `VLLMEngine` sends it.")
        try:
            given = {str(name): _decoded(data) for name, data in said["steerings"].items()}
            found = {name: steering_of(base64.b64decode(data)) for name, data in given.items()}
            blocks = tuple(
                (int(start), int(stop), tuple((int(at), int(end), found[name].id) for at, end, name in parts))
                for start, stop, parts in said["blocks"]
            )
            packs = tuple((str(handle), int(start)) for handle, start in said.get("packs", ()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PromptError(f"Got 'kp' that cannot be read ({type(error).__name__}: {error}).") from error
        for steering in found.values():
            steering.check(model)
        edges = [0, *(edge for start, stop, _ in blocks for edge in (start, stop)), len(token_ids) - 1]
        inner = [(start, *(at for part in parts for at in part[:2]), stop) for start, stop, parts in blocks]
        ordered = all(first <= second for row in (edges, *inner) for first, second in pairwise(row))
        if not 0 < len(blocks) <= _MOST_BLOCKS or not ordered or any(start == stop for start, stop, _ in blocks):
            raise PromptError(
                f"Got steered blocks at {[block[:2] for block in blocks]} of {len(token_ids)} tokens; expected 1 to "
                f"{_MOST_BLOCKS} in order, with their parts inside, and the last token behind them."
            )
        made = cls(blocks, {each.id: given[name] for name, each in found.items()}, packs, digest_of(token_ids))
        for number in range(len(blocks)):
            made.block(number)
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Altered:
        """What JSON made of `dataclasses.asdict`."""
        blocks = tuple((start, stop, tuple(map(tuple, parts))) for start, stop, parts in data["blocks"])
        return cls(**{**data, "blocks": blocks, "packs": tuple(map(tuple, data["packs"]))})

    def block(self, number: int) -> Region:
        """One of the blocks; raises `SteeringError` for key deltas on more than one token."""
        start, stop, parts = self.blocks[number]
        made = [Region(at, end, "steered", steering=_steering(self.steerings[name])) for at, end, name in parts]
        if any(part.steering and part.steering.keys and len(part) > 1 for part in made):
            raise SteeringError("Got key deltas for more than one position; one delta fits one position.")
        return Region(start, stop, "steered", parts=tuple(made))

    def until(self, number: int, token_ids: Sequence[int]) -> Altered:
        """The request that computes what block `number` alters: up to its end, behind the blocks before it."""
        stop = self.blocks[number][1]
        packs = tuple(each for each in self.packs if each[1] < stop)
        return replace(self, blocks=self.blocks[:number], packs=packs, tokens=digest_of(token_ids[:stop]), keep=True)

    def leaves(self, model: ModelFingerprint, namespaces: tuple[str, ...], token_ids: Sequence[int]) -> Below:
        """What a request with `keep` leaves behind."""
        return Below(self.key(model, namespaces, token_ids), namespaces, self)

    def begins(self, model: ModelFingerprint, namespaces: tuple[str, ...], token_ids: Sequence[int]) -> Below | None:
        """What a request begins with; `None` where nothing is steered."""
        if not self.blocks:
            return None
        last = self.until(len(self.blocks) - 1, token_ids)
        return Below(last.key(model, namespaces, token_ids[: self.blocks[-1][1]]), namespaces, self)

    @property
    def label(self) -> str:
        """What is done to the prompt, and where: of two requests with one label, equal ids have equal KV."""
        blocks = [f"{start}:{stop}:{self.block(number).label}" for number, (start, stop, _) in enumerate(self.blocks)]
        last = self.blocks[-1][1] if self.blocks else 0
        return "\0".join([*blocks, *sorted(handle for handle, start in self.packs if start < last)])

    def key(self, model: ModelFingerprint, namespaces: Sequence[str], token_ids: Sequence[int]) -> EntryKey:
        """Where the KV of `token_ids` behind these blocks is kept."""
        # Who reads other namespaces has entries of their own, so that time says nothing about what others ask.
        behind = "\0".join([",".join(sorted(namespaces)), self.label])
        before = f"{_BEFORE} {blake2b(behind.encode(), digest_size=32).hexdigest()}"
        packs = tuple(handle for handle, start in self.packs if start < len(token_ids))
        return EntryKey(model, 0, before, tuple(token_ids), packs, min(namespaces, default="default"))


@dataclass(frozen=True)
class Below:
    """The KV of a prompt's first tokens, kept under `key`, and the block of it that is altered when it is loaded."""

    key: EntryKey
    namespaces: tuple[str, ...]
    altered: Altered
    start = 0

    @property
    def handle(self) -> str:
        """What logs call it."""
        return "what is below a steered block"

    @property
    def stop(self) -> int:
        """How many tokens it has."""
        return len(self.key.token_ids)


def asked(plan: Plan) -> dict[str, Any] | None:
    """What a client sends for the steered blocks of a plan; `None` where there are none."""
    steered = [region for region in plan.regions if region.parts]
    if not steered:
        return None
    steerings = {part.steering.id: part.steering for region in steered for part in region.parts if part.steering}
    return {
        "blocks": [
            [
                region.start,
                region.stop,
                [[part.start, part.stop, part.steering.id] for part in region.parts if part.steering],
            ]
            for region in steered
        ],
        "steerings": {name: base64.b64encode(steering_bytes(each)).decode() for name, each in steerings.items()},
        "packs": [[span.handle, span.start] for span in plan.prompt.spans if find_handles(span.handle)],
    }


def digest_of(token_ids: Sequence[int]) -> str:
    """One digest of token ids."""
    return blake2b(json.dumps(list(token_ids)).encode(), digest_size=16).hexdigest()


def _decoded(data: object) -> str:
    if not isinstance(data, str) or len(data) > _MOST_BYTES:
        raise ValueError(f"expected a steering in base64, of at most {_MOST_BYTES} characters")
    base64.b64decode(data, validate=True)
    return data


@lru_cache(64)
def _steering(data: str) -> Steering:
    return steering_of(base64.b64decode(data))
