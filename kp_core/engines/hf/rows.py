"""Tokens of several sequences in one forward pass, each over its own KV buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kp_core.engines.hf.attention import Sees, attend, grouped_rows, joined, past_tiles, tile_of_each
from kp_core.engines.local.buffer import TILE, BufferLayer, KVBuffer
from kp_core.engines.local.tree import common_tokens

__all__ = ["Rows", "run_ragged"]

_SHORT = 2 * TILE
"""Tokens of rows that are attended to in one call though they share nothing: each has a copy of its keys there."""


class Rows:
    """Decodes one token of each of `buffers` in one forward pass.

    Rows whose buffers begin with the same tiles of KV attend to these together: their queries are rows of one matrix,
    and the keys are read once. What each has of its own is attended to beside it, and joined as in `attention`, so
    every row has the bits that it has alone. Other rows attend one by one; so do all in layers that see a window.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,  # noqa: ANN401
        buffers: Sequence[KVBuffer],
        sees: Sequence[Sees],
        **options: Any,  # noqa: ANN401
    ) -> None:
        self._model, self._options, self._buffers, self._sees = model, options, tuple(buffers), sees
        layers = [at for at, each in enumerate(sees) if not each.window]
        self._groups = [_Group(buffers, rows, tiles, layers) for rows, tiles in _grouped(buffers)]
        grouped = {row for group in self._groups for row in group.rows}
        self._alone = [row for row in range(len(buffers)) if row not in grouped]
        self._cache = _cache_of(buffers)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Run a token behind each buffer, and write its KV there; the logits, `(rows, vocabulary)`."""
        device = self._buffers[0].layers[0].keys.device
        for buffer in self._buffers:
            buffer.blank(buffer.length + 1)
        for group in self._groups:
            group.begin()
        output = self._model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor([[buffer.length] for buffer in self._buffers], device=device),
            past_key_values=self._cache,
            use_cache=True,
            kp_attend=self.attend,
            **self._options,
        )
        last: Tensor = output.logits[:, -1]
        return last.clone()

    def attend(  # noqa: PLR0913
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of `query`, `(rows, heads, 1, head_dim)`, whose keys and values the buffers hold already."""
        found = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)
        alone = range(len(self._buffers)) if self._sees[layer].window else self._alone
        for row in alone:
            held = self._buffers[row].layers[layer]
            at = range(held.length - 1, held.length)
            found[row] = attend(query[row : row + 1], held.keys, held.values, at, scale, self._sees[layer], sinks)[0]
        if not self._sees[layer].window:
            for group in self._groups:
                group.attend(layer, query, key, value, scale, sinks, found)
        return found


@torch.inference_mode()
def run_ragged(
    model: Any,  # noqa: ANN401
    buffers: Sequence[KVBuffer],
    tokens: Sequence[Sequence[int]],
    sees: Sequence[Sees],
    *,
    keeps_logits: bool,
) -> Tensor:
    """Run as many `tokens` behind each of `buffers` as there are, in one pass; the logits, `(rows, vocabulary)`.

    The tokens are one sequence for all that looks at each token alone, and each row attends over its own buffer.
    """
    counts, device = [len(each) for each in tokens], buffers[0].layers[0].keys.device
    last = torch.tensor(list(accumulate(counts)), device=device) - 1
    positions = [range(each.length, each.length + count) for each, count in zip(buffers, counts, strict=True)]
    for buffer, at in zip(buffers, positions, strict=True):
        buffer.blank(at.stop)

    def attend_each(
        layer: int, query: Tensor, _key: Tensor, _value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        found = []
        for asked, buffer, at in zip(query.split_with_sizes(counts, 2), buffers, positions, strict=True):
            held = buffer.layers[layer]
            found.append(attend(asked, held.keys, held.values, at, scale, sees[layer], sinks))
        return torch.cat(found, dim=2)

    output = model(
        input_ids=torch.tensor(list(chain(*tokens)), device=device)[None],
        position_ids=torch.tensor(list(chain(*positions)), device=device)[None],
        past_key_values=_cache_of(buffers, counts),
        use_cache=True,
        kp_attend=attend_each,
        **({"logits_to_keep": last} if keeps_logits else {}),
    )
    logits: Tensor = output.logits[0]
    return logits.clone() if keeps_logits else logits[last]


def _grouped(buffers: Sequence[KVBuffer]) -> list[tuple[list[int], int]]:
    """The rows that begin with the same tiles, and how many tiles these are; long rows that share none are left out."""
    groups: list[tuple[list[int], int]] = []
    if buffers[0].layers[0].keys.device.type != "cpu":
        return groups
    for row, buffer in enumerate(buffers):
        for at, (rows, tiles) in enumerate(groups):
            shared = min(tiles, common_tokens(buffers[rows[0]].runs, buffer.runs) // TILE)
            if shared:
                groups[at] = ([*rows, row], shared)
                break
        else:
            groups.append(([row], buffer.length // TILE))
    short = [rows[0] for rows, _ in groups if len(rows) == 1 and buffers[rows[0]].length < _SHORT]
    found = [(rows, tiles) for rows, tiles in groups if len(rows) > 1]
    return [*found, (short, 0)] if len(short) > 1 else found


class _Group:
    """Some `rows` of `buffers` that share their first `tiles`, if any, with a copy of what each has behind these.

    Only in `layers`; the others see windows.
    """

    def __init__(self, buffers: Sequence[KVBuffer], rows: Sequence[int], tiles: int, layers: Sequence[int]) -> None:
        self.rows, self._layers, self._tiles = rows, layers, tiles
        self._buffers = [buffers[row] for row in rows]
        self._index, self._each = torch.tensor(rows), torch.arange(len(rows))
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._room = 0
        self._parts: list[tuple[int, Tensor | None, Tensor]] = []

    def begin(self) -> None:
        """Before each step: where its tokens go, and which tiles of its own each row sees."""
        lengths = torch.tensor([buffer.length - self._tiles * TILE for buffer in self._buffers])
        if (longest := int(lengths.max())) >= self._room:
            self._room = (longest // TILE + 1) * TILE
            self._own = {layer: self._copied(layer, lengths.tolist()) for layer in self._layers}
        self._ends, before = lengths, lengths // TILE
        dtype = self._buffers[0].layers[0].keys.dtype
        self._parts = []
        for count in sorted(set(before.tolist())):
            among = (before == count).nonzero()[:, 0]
            seen = torch.arange(TILE) <= (lengths[among] % TILE)[:, None]
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None, None]
            self._parts.append((count, None if len(among) == len(lengths) else among, mask))

    def attend(  # noqa: PLR0913
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        sinks: Tensor | None,
        found: Tensor,
    ) -> None:
        """Attention of these rows of `query`, `(all rows, heads, 1, head_dim)`, written to their rows of `found`."""
        if len(self.rows) < len(query):
            query, key, value = query[self._index], key[self._index], value[self._index]
        held, (own_keys, own_values) = self._buffers[0].layers[layer], self._own[layer]
        own_keys[self._each, :, self._ends] = key[:, :, 0]
        own_values[self._each, :, self._ends] = value[:, :, 0]
        heads, kv_heads = query.shape[1], own_keys.shape[1]
        share = heads // kv_heads
        shared = self._attend_shared(query, held, kv_heads, scale) if self._tiles else None
        grouped, _ = grouped_rows(query, kv_heads)
        for before, among, mask in self._parts:
            rows, keys, values = grouped, own_keys, own_values
            outputs, weights = ([], []) if shared is None else ([shared[0]], [shared[1]])
            if among is not None:
                rows, keys, values = grouped[among], own_keys[among], own_values[among]
                outputs, weights = [each[:, among] for each in outputs], [each[:, among] for each in weights]
            spread = mask.expand(-1, 1, rows.shape[2], -1)
            for at in (before, *range(before)):
                tile = slice(at * TILE, (at + 1) * TILE)
                asked = spread if at == before else None
                output, lse = tile_of_each(rows, keys[:, :, tile], values[:, :, tile], asked, scale)
                place = 0 if at == before else len(outputs)  # The own tile is the first, as in `attention`.
                outputs.insert(place, output[None, :, :, :share])
                weights.insert(place, lse[None, :, :, :share])
            behind = None if sinks is None else sinks.reshape(1, kv_heads, share).expand(len(rows), -1, -1)
            result = joined(outputs, weights, query.dtype, behind).reshape(len(rows), heads, 1, -1)
            found[self._index if among is None else self._index[among]] = result

    def _attend_shared(
        self, query: Tensor, held: BufferLayer, kv_heads: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Results and log-sum-exps over the shared tiles, `(tiles, rows, kv_heads, share, ...)`: keys are read once."""
        count, heads, _, dim = query.shape
        share = heads // kv_heads
        together = query.reshape(1, count, kv_heads, share, dim).transpose(1, 2).flatten(2, 3)
        output, weight = past_tiles(
            grouped_rows(together, kv_heads)[0], held.keys, held.values, range(self._tiles), scale
        )
        shape = (self._tiles, kv_heads, count, share)
        shared = output[:, :, : count * share].reshape(*shape, -1).transpose(1, 2)
        return shared, weight[:, :, : count * share].reshape(shape).transpose(1, 2)

    def _copied(self, layer: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        held, start = [buffer.layers[layer] for buffer in self._buffers], self._tiles * TILE
        made = []
        for sides in ([each.keys for each in held], [each.values for each in held]):
            own = sides[0].new_zeros(len(held), sides[0].shape[1], self._room, sides[0].shape[3])
            for row, (side, tokens) in enumerate(zip(sides, lengths, strict=True)):
                own[row, :, :tokens] = side[0, :, start : start + tokens]
            made.append(own)
        return made[0], made[1]


def _cache_of(buffers: Sequence[KVBuffer], counts: Sequence[int] = ()) -> Cache:
    """The buffers as one cache: of a token each, or of `counts` tokens that come as one sequence."""
    layers = range(len(buffers[0].layers))
    return Cache(layers=[_RowsLayer([buffer.layers[at] for buffer in buffers], counts) for at in layers])


class _RowsLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of several buffers: takes tokens for each, and gives back what it took."""

    is_sliding = False

    def __init__(self, layers: list[BufferLayer], counts: Sequence[int]) -> None:
        super().__init__()
        self._layers, self._counts = layers, list(counts)
        self.keys, self.values = layers[0].keys, layers[0].values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are allocated whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write row by row; attention finds what is before in the buffers."""
        parts = [
            side.split_with_sizes(self._counts, 2) if self._counts else side.chunk(len(self._layers))
            for side in (key_states, value_states)
        ]
        for layer, keys, values in zip(self._layers, *parts, strict=True):
            layer.write(keys, values)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens filled in the longest row."""
        return max(layer.length for layer in self._layers)

    def get_max_length(self) -> int:
        """Tokens there is memory for."""
        return min(layer.keys.shape[2] for layer in self._layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self.get_seq_length() + query_length, 0
