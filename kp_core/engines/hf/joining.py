"""Whether forward passes that follow one another may run as one, with every bit as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kp_core.engines.hf.packed import rows_stand_alone
from kp_core.engines.local.buffer import CacheShape, KVBuffer

__all__ = ["passes_join"]

_PARTS = (8, 4, 1, 3)


class _Model(Protocol):
    """What is tried of a `CausalModel`."""

    shape: CacheShape

    @property
    def network(self) -> PreTrainedModel:
        """The model itself."""

    def forward(
        self, ids: Tensor, buffer: KVBuffer, *, logits: bool = True, parts: Sequence[int] = ()
    ) -> Tensor | None:
        """See `LocalModel.forward`."""


def passes_join(model: _Model, packed: Sequence[nn.Linear]) -> bool:
    """Whether `model`, whose layers `packed` multiply with packed weights, gives each part of a pass the same bits.

    So it is where all its weights are packed and oneDNN multiplies each row by itself: attention is computed part by
    part, and the rest looks at each token alone. Both are tried: products on one layer of each shape, and then a pass.
    """
    network = model.network
    layers = [network.get_input_embeddings(), network.get_output_embeddings(), *packed]
    known = {id(layer.weight) for layer in layers}
    # Other matrices, e.g. of experts, may be multiplied in other ways.
    if not packed or any(each.ndim > 1 and id(each) not in known for each in network.parameters()):
        return False
    return rows_stand_alone(packed) and _agrees(model)


def _agrees(model: _Model) -> bool:
    embeddings: nn.Embedding = model.network.get_input_embeddings()
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.num_embeddings, (1, sum(_PARTS)), generator=chance)
    joined, apart = KVBuffer(model.shape, sum(_PARTS)), KVBuffer(model.shape, sum(_PARTS))
    found, expected = model.forward(ids, joined, parts=_PARTS), None
    for part in torch.split(ids, list(_PARTS), dim=1):
        expected = model.forward(part, apart)
    same = joined.read(0, joined.length).equal(apart.read(0, apart.length))
    return same and found is not None and expected is not None and torch.equal(found, expected)
