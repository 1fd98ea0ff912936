"""Runs tokens of several sequences in one forward pass, each over its own KV buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from kp_core.engines.hf.attention import (
    Sees,
    attend,
    bias_of,
    grouped_rows,
    joined,
    keys_to_read,
    large_mask,
    of_tiles,
    tile_of_each,
    tiles_of,
)
from kp_core.engines.hf.kinds import Network
from kp_core.engines.local.buffer import TILE, BufferLayer, KVBuffer, new_tensor
from kp_core.engines.local.tree import common_tokens

_SHORT = 2 * TILE
"""Rows with fewer tokens than this share one attention call without a common prefix, over a copy of their keys."""

_SPARE = 16  # Room for copies of tiles is allocated in multiples of this, so that one more row fits.


class Rows:
    """Decodes one token of each of `buffers` in one forward pass. Every row has the same bits as alone.

    Rows whose buffers begin with the same tiles of KV attend to these together: their queries are rows of one matrix,
    and the keys are read once. Other rows attend one at a time, and so do all rows in layers with a window.
    """

    @torch.inference_mode()
    def __init__(self, model: Network, buffers: Sequence[KVBuffer]) -> None:
        self._model, self._buffers, self._sees = model, tuple(buffers), model.sees
        layers = [at for at, sees in enumerate(self._sees) if not sees.window]
        self._groups = [
            _Group([buffers[row] for row in rows], rows, tiles, layers) for rows, tiles in _grouped(buffers)
        ]
        grouped = {row for group in self._groups for row in group.rows}
        self._alone = [row for row in range(len(buffers)) if row not in grouped]
        self._deferred = sorted(grouped) if len(layers) == len(self._sees) else []
        """Rows whose new KV is written after the pass, all layers at once. Attention reads it from the groups' copies.
        """
        self._new: list[tuple[Tensor, Tensor]] = []
        self._cache = cache_of_rows(buffers)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Run one token behind each buffer and write its KV there; returns the logits, `(rows, vocabulary)`."""
        for group in self._groups:
            group.begin()
        self._new.clear()
        logits = _run(self._model, self._buffers, [(token,) for token in tokens], self._attend, self._cache)
        if self._deferred:
            keys, values = (torch.stack(side) for side in zip(*self._new, strict=True))
            for row in self._deferred:
                self._buffers[row].append_token(keys[:, row], values[:, row])
        return logits

    def _attend(  # noqa: PLR0913
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of `query`, `(1, heads, rows, head_dim)`. Writes the KV of rows that are not deferred."""
        query, key, value = (side[0].transpose(0, 1) for side in (query, key, value))
        if self._deferred:
            self._new.append((key, value))
        if len(self._deferred) == len(self._buffers) and len(self._groups) == 1:
            output = self._groups[0].attend(layer, query, key, value, scale, sinks)
        else:
            output = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
            for row, buffer in enumerate(self._buffers):
                kv = buffer.layers[layer]
                if row not in self._deferred:
                    kv.write(key[row, None, :, None], value[row, None, :, None])
                if row in self._alone or self._sees[layer].window:
                    at, own = range(kv.length - 1, kv.length), query[row, None, :, None]
                    output[row] = attend(own, kv.keys, kv.values, at, scale, self._sees[layer], sinks)[0, :, 0]
            for group in () if self._sees[layer].window else self._groups:
                rows = group.index
                output[rows] = group.attend(layer, query[rows], key[rows], value[rows], scale, sinks)
        return output.transpose(0, 1)[None]


@torch.inference_mode()
def run_ragged(model: Network, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
    """See `Model.ragged`. What all rows of one buffer see is read once."""
    counts, first, sees = [len(row_tokens) for row_tokens in tokens], buffers[0], model.sees
    positions = [range(buffer.length, buffer.length + count) for buffer, count in zip(buffers, counts, strict=True)]
    sides = {side.shape for side in first.stacked or ()}
    is_one = first.shape.device.type == "cpu" and len(sides) == 1 and all(buffer is first for buffer in buffers)
    attend_together = _branching(first, counts) if is_one and len(buffers) > 1 else None

    def attend_each(  # noqa: PLR0913
        layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        if attend_together and not sees[layer].window:
            return attend_together(layer, query, key, value, scale, sinks)
        rows, outputs = zip(*(side.split_with_sizes(counts, 2) for side in (query, key, value)), strict=True), []
        for buffer, at, (own_query, own_key, own_value) in zip(buffers, positions, rows, strict=True):
            kv = buffer.layers[layer]
            kv.length = at.start  # Another row of this buffer may have been written here.
            kv.write(own_key, own_value)
            outputs.append(attend(own_query, kv.keys, kv.values, at, scale, sees[layer], sinks))
        return torch.cat(outputs, dim=2)

    return _run(model, buffers, tokens, attend_each, cache_of_rows(buffers))


def _branching(buffer: KVBuffer, counts: Sequence[int]) -> Callable[..., Tensor]:
    """Attention of rows with `counts` tokens, each behind the tokens of `buffer`, which is not written to.

    The whole tiles before the rows are read once. Of the others each row has a copy, and one call reads those of all.
    """
    start, longest = buffer.length, max(counts)
    tiles = range(start // TILE, (start + longest - 1) // TILE + 1)
    before, last = start % TILE, keys_to_read((start + longest - 1) % TILE + 1)
    _, kv_heads, _, dim = buffer.layers[0].keys.shape
    # Keys and values of each row, in one layer at a time. Attention reads what is masked, too, and it must be finite.
    copies = torch.zeros(2, len(counts), kv_heads, (len(tiles) - 1) * TILE + last, dim, dtype=buffer.shape.dtype)

    def padded(side: Tensor) -> Tensor:
        """`(1, heads, all tokens, dim)` as `(rows, heads, longest, dim)`."""
        rows = [*side[0].transpose(0, 1).split_with_sizes(counts)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)

    def unpadded(side: Tensor, share: int) -> Tensor:
        """The other way, where `share` heads of the query stand behind one another."""
        rows = side[:, :, : share * longest].reshape(*side.shape[:2], share, longest, *side.shape[3:])
        return torch.cat([row[:, :, :count] for row, count in zip(rows, counts, strict=True)], dim=2)[None]

    def attend_together(  # noqa: PLR0913
        layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        kv, share = buffer.layers[layer], query.shape[1] // kv_heads
        for copy, side, new in zip(copies, (kv.keys, kv.values), (key, value), strict=True):
            copy[:, :, :before] = side[:, :, start - before : start]
            copy[:, :, before : before + longest] = padded(new)
        grouped, extra = grouped_rows(padded(query), kv_heads)
        masks, blind = large_mask(tuple(range(start, start + longest)), share, extra, tiles, Sees(), query.dtype)
        parts, whole = list[tuple[Tensor, Tensor]](), range(tiles.start)
        if whole:
            parts.append(of_tiles(query, tiles_of(kv.keys, whole), tiles_of(kv.values, whole), scale))
        for at, (keys, values) in enumerate(zip(*(copy.split(TILE, 2) for copy in copies), strict=True)):
            output, weight = tile_of_each(grouped, keys, values, masks[at : at + 1, ..., : keys.shape[2]], scale)
            weight = weight if blind is None else weight.masked_fill(blind[at], -torch.inf)
            parts.append((unpadded(output, share), unpadded(weight, share)))
        row_sinks = None if sinks is None else sinks.reshape(kv_heads, share, 1).expand(-1, -1, query.shape[2])
        outputs, weights = map(list, zip(*parts, strict=True))
        return joined(outputs, weights, query.dtype, row_sinks).reshape(query.shape)

    return attend_together


def _run(
    model: Network,
    buffers: Sequence[KVBuffer],
    tokens: Sequence[Sequence[int]],
    attend_each: Callable[..., Tensor],
    cache: Cache,
) -> Tensor:
    """Run `tokens` behind each buffer in one pass; returns the logits at the last of each, `(rows, vocabulary)`.

    They are one sequence for the model. `attend_each` writes their KV, and computes the attention of each row.
    """
    device, positions = buffers[0].layers[0].keys.device, list[int]()
    for buffer, row_tokens in zip(buffers, tokens, strict=True):
        stop = buffer.length + len(row_tokens)
        positions += range(buffer.length, stop)
        buffer.blank(stop)
    last_indices = torch.tensor([*accumulate(map(len, tokens))], device=device) - 1
    with ExitStack() as stack:
        for buffer in buffers:
            stack.enter_context(buffer.passing())
        output = model.network(
            input_ids=torch.tensor([[*chain(*tokens)]], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=True,
            kp_attend=attend_each,
            **{model.takes_cache: cache},
            **model.keep(last_indices),
        )
    logits: Tensor = output.logits[0]
    return logits.clone() if model.keeps_logits else logits[last_indices]


def _grouped(buffers: Sequence[KVBuffer]) -> list[tuple[list[int], int]]:
    """Groups of rows that begin with the same tiles, and the number of these tiles.

    Short rows without common tiles form one group with 0 tiles. Long ones are left out. On an accelerator, and where
    layers have different shapes, all are.
    """
    groups: list[tuple[list[int], int]] = []
    if buffers[0].layers[0].keys.device.type != "cpu" or not all(buffer.stacked for buffer in buffers):
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
    shared_groups = [(rows, tiles) for rows, tiles in groups if len(rows) > 1]
    return [*shared_groups, (short, 0)] if len(short) > 1 else shared_groups


class _Group:
    """Some `rows` that share their first `tiles`, if any, with a copy of each row's own tiles behind them.

    Only for `layers`; the others have windows.
    """

    def __init__(self, buffers: Sequence[KVBuffer], rows: Sequence[int], tiles: int, layers: Sequence[int]) -> None:
        self.rows, self._layers, self._tiles, self._buffers = rows, layers, range(tiles), buffers
        self.index = torch.tensor(rows)
        self._layer_index = {layer: at for at, layer in enumerate(layers)}
        self._own: list[Tensor] = []
        """Copies of the keys and values of the rows' own tiles, `(layers, room, kv_heads, TILE, head_dim)` each."""
        self._at: dict[tuple[int, int], int] = {}
        """Index in `_own` of each pair of tile and row. Tiles that begin later are appended."""
        self._room = 0
        self._calls: list[tuple[slice, int]] = []
        """Which pairs of tile and row share a call of the kernel, and how many keys of each tile it reads."""
        self._read: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Of each layer, the keys and values that the calls read, those of the shared tiles last. Views."""

    def begin(self) -> None:
        """Prepare a step: where its tokens are written, and the mask of each row over its own tiles."""
        ends = torch.tensor([buffer.length for buffer in self._buffers]) - len(self._tiles) * TILE
        last_tiles = (ends // TILE).tolist()
        needed = [
            (tile, row)
            for tile in range(max(last_tiles) + 1)
            for row in range(len(last_tiles))
            if tile <= last_tiles[row]
        ]
        started = [pair for pair in needed if pair not in self._at]
        self._at |= {pair: len(self._at) + number for number, pair in enumerate(started)}
        if len(needed) > self._room:
            self._room = -(-(len(needed) + len(last_tiles)) // _SPARE) * _SPARE
            self._own = [self._copied(0), self._copied(1)]
            self._read.clear()
        else:
            for own in self._own:  # Attention reads what is masked, too, and it must be finite.
                own[:, len(self._at) - len(started) : len(self._at)] = 0
        self._tile_of, self._row_of = torch.tensor(list(self._at)).unbind(1)
        self._is_full = list(self._at) == [
            (tile, row) for tile in range(max(last_tiles) + 1) for row in range(len(last_tiles))
        ]
        visible = torch.arange(TILE) + self._tile_of[:, None] * TILE <= ends[self._row_of, None]
        mask = bias_of(visible, self._buffers[0].shape.dtype)[:, None, None]
        calls = _calls((ends[self._row_of] - self._tile_of * TILE + 1).tolist())
        if calls != self._calls:
            self._calls = calls
            self._read.clear()
        self._masks = [mask[pairs, ..., :keys] for pairs, keys in calls]
        rows_of = [self._row_of[pairs] for pairs, _ in calls]
        in_order = list(range(len(self.rows)))
        self._rows_of = [None if rows.tolist() == in_order else rows for rows in rows_of]
        """The rows of each call, or `None` if it takes one tile of all rows, in order."""
        self._place = (
            torch.tensor([self._at[tile, row] for row, tile in enumerate(last_tiles)]),
            slice(None),
            ends % TILE,
        )

    def attend(  # noqa: PLR0913
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of these rows; `query` and the result are `(rows, heads, head_dim)`."""
        own_keys, own_values = (own[self._layer_index[layer]] for own in self._own)
        own_keys[self._place], own_values[self._place] = key, value
        rows, kv_heads = len(query), key.shape[1]
        share = query.shape[1] // kv_heads
        grouped, _ = grouped_rows(query[:, :, None], kv_heads)
        read = self._read.get(layer) or self._views(layer)
        parts = [
            tile_of_each(
                grouped if rows_of is None else grouped[rows_of],
                keys,
                values,
                mask.expand(-1, -1, grouped.shape[2], -1),
                scale,
            )
            for rows_of, mask, (keys, values) in zip(self._rows_of, self._masks, read, strict=False)
        ]
        outputs = self._by_tile([output[:, :, :share] for output, _ in parts], 0)
        weights = self._by_tile([weight[:, :, :share] for _, weight in parts], -torch.inf)
        if self._tiles:
            shared, weight = of_tiles(query.transpose(0, 1)[None], *read[-1], scale)
            outputs, weights = [shared.movedim(3, 1), *outputs], [weight.movedim(3, 1), *weights]
        row_sinks = None if sinks is None else sinks.reshape(1, kv_heads, share).expand(rows, -1, -1)
        return joined(outputs, weights, query.dtype, row_sinks).reshape(rows, -1, value.shape[2])

    def _views(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Make the views of a layer for `_read`, which serve until other keys are read."""
        own_keys, own_values = (own[self._layer_index[layer]] for own in self._own)
        views = [(own_keys[pairs, :, :keys], own_values[pairs, :, :keys]) for pairs, keys in self._calls]
        if self._tiles:
            kv = self._buffers[0].layers[layer]
            views.append((tiles_of(kv.keys, self._tiles), tiles_of(kv.values, self._tiles)))
        self._read[layer] = views
        return views

    def _by_tile(self, parts: list[Tensor], missing: float) -> list[Tensor]:
        """Results of the calls, one entry per pair, as `(tiles, rows, ...)`; what a row does not have is `missing`."""
        rows, shape = len(self.rows), parts[0].shape[1:]
        if all(rows_of is None for rows_of in self._rows_of):
            return [part[None] for part in parts]
        side = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._is_full:
            return [side.reshape(-1, rows, *shape)]
        filled = side.new_full((int(self._tile_of.max()) + 1, rows, *shape), missing)
        filled[self._tile_of, self._row_of] = side
        return [filled]

    def _copied(self, side: int) -> Tensor:
        """A copy of the keys, side 0, or values of the rows' own tiles, with room for more."""
        sources = [(buffer.stacked or ())[side] for buffer in self._buffers]
        count, kv_heads, _, dim = sources[0].shape
        shape = (len(self._layers), self._room, kv_heads, TILE, dim)
        own = new_tensor(shape, sources[0].dtype, sources[0].device)
        layers = slice(None) if len(self._layers) == count else self._layers
        for (tile, row), at in self._at.items():
            start = (len(self._tiles) + tile) * TILE
            stop = min(start + TILE, self._buffers[row].length)
            own[:, at, :, : stop - start] = sources[row][layers, :, start:stop]
            own[:, at, :, stop - start :] = 0
        return own


def _calls(visible: Sequence[int]) -> list[tuple[slice, int]]:
    """Which pairs of tile and row share a call of the kernel, and how many keys of each tile it reads.

    `visible` is the number of keys that each pair sees; the last pairs are often of tiles that have just begun.
    """
    counts = [keys_to_read(keys) for keys in visible]
    whole = next((stop for stop in range(len(counts), 0, -1) if counts[stop - 1] == TILE), 0)
    calls = [(slice(0, whole), TILE), (slice(whole, len(counts)), max(counts[whole:], default=0))]
    return [(pairs, keys) for pairs, keys in calls if pairs.start < pairs.stop]


def cache_of_rows(buffers: Sequence[KVBuffer]) -> Cache:
    """The buffers as one cache, to which attention writes itself."""
    return Cache(
        layers=[RowsLayer(list(layers)) for layers in zip(*(buffer.layers for buffer in buffers), strict=True)]
    )


class RowsLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of several buffers, which hands what a pass computes to attention."""

    def __init__(self, layers: list[BufferLayer]) -> None:
        super().__init__()
        self._layers = layers
        self.keys, self.values = layers[0].memory
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Number of filled tokens in the longest row."""
        return max(layer.length for layer in self._layers)
