"""The field `kp` of a request (steered blocks, moved packs, or no reuse): how it is written and read."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load, save

from kp_core import ModelFingerprint, Plan, Region, find_handles
from kp_core.errors import OptionError, PromptError
from kp_core.prompt.prompt import SoftTokens
from kp_core.steering import Steering, steering_bytes, steering_of

COMPUTED = "kp-computed-tokens"
"""Response header: the number of tokens computed before the prompt could be steered or its packs moved."""
FIRST_PACK = "kp-pack"
"""Request header: the first pack in a prompt of token ids. A load balancer may route by it."""

Moved: TypeAlias = tuple[tuple[int, int, str], ...]
"""Moved packs, in order: start, stop and handle of each."""
Placed: TypeAlias = tuple[tuple[str, int], ...]
"""Handles of all packs in a prompt, with their starts. KV kept of a prompt is deleted with any of its packs."""

_MOST_BLOCKS, _MOST_PACKS = 64, 256
_MOST_BYTES = 8 * 2**20  # Limit of a steering; one of an 8B model has about 50 kB.


def asked(plan: Plan) -> dict[str, Any] | None:
    """The field `kp` of a request for this plan; `None` if the plan needs none."""
    packs = [[span.handle, span.start] for span in plan.prompt.spans if find_handles(span.handle)]
    if blocks := [region for region in plan.regions if region.parts]:
        return {**blocks_as_json(blocks), "packs": packs}
    if not plan.reuse:
        return {"reuse": False}
    composed = [region for region in plan.regions if region.composer]
    if not composed:
        return None
    moves = [[span.start, span.stop, span.handle] for region in composed for span in region.spans]
    soft = next((span.soft for region in composed for span in region.spans), None)
    return {"moved": moves, "packs": packs} | ({} if soft is None else {"soft": soft_as_text(soft)})


def soft_as_text(soft: SoftTokens) -> str:
    """Soft tokens in base64, for `soft_of`."""
    return base64.b64encode(save({"header": soft.header, "trailer": soft.trailer})).decode()


def soft_of(text: object) -> SoftTokens:
    """Read the output of `soft_as_text`; raises `PromptError` for anything else."""
    if not isinstance(text, str) or len(text) > _MOST_BYTES:
        raise PromptError(f"Expected soft tokens in base64, of at most {_MOST_BYTES} characters.")
    with _refused():
        tensors = load(base64.b64decode(text, validate=True))
        return SoftTokens(tensors["header"], tensors["trailer"])


def steered(field: object, token_ids: object, model: ModelFingerprint) -> tuple[list[Region], Placed]:
    """Read the steered blocks, and the packs in the prompt. Raises `PromptError` and `OptionError`."""
    ids, fields = _checked(field, token_ids, {"blocks", "steerings", "packs"})
    with _refused():
        blocks, packs = blocks_of(fields), _packs(fields)
    parts = [(part, part.steering) for block in blocks for part in block.parts if part.steering]
    for _, steering in parts:
        steering.check(model)
    is_inside = all(
        _is_ascending([block.start, *(edge for part in block.parts for edge in (part.start, part.stop)), block.stop])
        for block in blocks
    )
    places = [(block.start, block.stop) for block in blocks]
    _check_places("steered blocks", places, ids, _MOST_BLOCKS, is_inside=is_inside)
    if any(steering.keys and len(part) > 1 for part, steering in parts):
        raise OptionError("Got key deltas for more than one position; one delta fits one position.")
    return blocks, packs


def moved_packs(field: object, token_ids: object) -> tuple[Moved, Placed]:
    """Read the moved packs, and all packs in the prompt. Raises `PromptError`."""
    ids, fields = _checked(field, token_ids, {"moved", "packs", "soft"})
    with _refused():
        spans = tuple((int(start), int(stop), str(handle)) for start, stop, handle in fields["moved"])
        packs = _packs(fields)
    _check_places("moved packs", [span[:2] for span in spans], ids, _MOST_PACKS)
    return spans, packs


def blocks_as_json(blocks: Iterable[Region]) -> dict[str, Any]:
    """Blocks as JSON for `blocks_of`: each names its steerings by id; the steering files follow in base64."""
    blocks = list(blocks)
    steerings = {part.steering.id: part.steering for block in blocks for part in block.parts if part.steering}
    rows = [[[part.start, part.stop, part.steering.id] for part in block.parts if part.steering] for block in blocks]
    return {
        "blocks": [[block.start, block.stop, parts] for block, parts in zip(blocks, rows, strict=True)],
        "steerings": {
            name: base64.b64encode(steering_bytes(steering)).decode() for name, steering in steerings.items()
        },
    }


def blocks_of(fields: Mapping[str, Any]) -> list[Region]:
    """Read the output of `blocks_as_json`. Other input raises `OptionError`, or `KeyError` and the like."""
    steerings = {name: _steering(data) for name, data in fields["steerings"].items()}
    blocks = []
    for start, stop, parts in fields["blocks"]:
        parts_inside = [Region(int(at), int(end), "steered", steering=steerings[name]) for at, end, name in parts]
        blocks.append(Region(int(start), int(stop), "steered", parts=tuple(parts_inside)))
    return blocks


def _checked(field: object, token_ids: object, fields: set[str]) -> tuple[list[int], Mapping[str, Any]]:
    if not isinstance(token_ids, list) or not all(type(token) is int and 0 <= token < 2**63 for token in token_ids):
        raise PromptError("Got 'kp' with a prompt that is not one list of token ids; what it names is placed by them.")
    if not isinstance(field, Mapping) or set(field) - fields:
        raise PromptError(f"Expected 'kp' with the fields {sorted(fields)}, as `VLLMEngine` sends it.")
    return token_ids, field


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise PromptError(f"Got 'kp' that cannot be read ({type(error).__name__}: {error}).") from error


def _packs(fields: Mapping[str, Any]) -> Placed:
    return tuple((str(handle), int(start)) for handle, start in fields.get("packs", ()))


def _check_places(
    name: str, places: Sequence[tuple[int, int]], ids: Sequence[int], most: int, *, is_inside: bool = True
) -> None:
    """Raise `PromptError` unless there are 1 to `most` places, in order and not empty, with a token behind the last."""
    edges = [0, *(edge for place in places for edge in place), len(ids) - 1]
    is_ordered = 0 < len(places) <= most and _is_ascending(edges) and all(start < stop for start, stop in places)
    if not is_inside or not is_ordered:
        raise PromptError(
            f"Got {name} at {places} of {len(ids)} tokens; expected 1 to {most} in order, with their parts inside, "
            "and the last token behind them."
        )


def _is_ascending(numbers: Sequence[int]) -> bool:
    return all(smaller <= larger for smaller, larger in pairwise(numbers))


@lru_cache(64)
def _steering(data: object) -> Steering:
    if not isinstance(data, str) or len(data) > _MOST_BYTES:
        raise ValueError(f"expected a steering in base64, of at most {_MOST_BYTES} characters")
    return steering_of(base64.b64decode(data, validate=True))
