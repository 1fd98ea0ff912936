"""Tokens of several sequences in one forward pass, each over its own KV buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kp_core.engines.hf.attention import causal_attention
from kp_core.engines.local.buffer import BufferLayer, KVBuffer

__all__ = ["Rows", "run_ragged"]

_SHARED = 128
"""Tokens that rows must have in common before they are read once for all: joining two parts takes as long."""
_ROOM = 64

_attention = torch.nn.functional.scaled_dot_product_attention


class Rows:
    """Decodes one token of each of `buffers` in one forward pass; keeps `local.scheduler.DecodedRows`.

    Rows whose buffers begin with the same runs of KV attend over these together: their queries are rows of one matrix,
    and the keys are read once; what each has of its own is attended over beside it, and both are joined by the
    log-sum-exp of each, as in `attention.split_attention`. Other rows attend one by one, as they would alone; so do all
    in layers with a window (`windows`, as in `CacheKind`), over as much as it lets them see.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,  # noqa: ANN401
        buffers: Sequence[KVBuffer],
        windows: Sequence[int | None],
        **options: Any,  # noqa: ANN401
    ) -> None:
        self._model, self._options, self._buffers, self._windows = model, options, tuple(buffers), windows
        whole = [at for at, window in enumerate(windows) if not window]
        self._groups = [
            _Group([buffers[row] for row in rows], rows, shared, whole) for rows, shared in _grouped(buffers)
        ]
        self._cache = _cache_of(buffers)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Run a token behind each buffer, and write its KV there; the logits, `(rows, vocabulary)`."""
        device = self._buffers[0].layers[0].keys.device
        for group in self._groups:
            group.begin()
        output = self._model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor([[buffer.length] for buffer in self._buffers], device=device),
            past_key_values=self._cache,
            use_cache=True,
            kp_rows=self.attend,
            **self._options,
        )
        last: Tensor = output.logits[:, -1]
        return last.clone()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention of `query`, `(rows, heads, 1, head_dim)`, whose keys and values the buffers hold already."""
        if window := self._windows[layer]:
            asked = zip(query.chunk(len(self._buffers)), self._buffers, strict=True)
            return torch.cat([_seen(each, buffer.layers[layer], window, scale) for each, buffer in asked])
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, query, key, value, scale)
        found = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)
        for group in self._groups:
            rows = group.index
            found[rows] = group.attend(layer, query[rows], key[rows], value[rows], scale)
        return found


@torch.inference_mode()
def run_ragged(
    model: Any,  # noqa: ANN401
    buffers: Sequence[KVBuffer],
    tokens: Sequence[Sequence[int]],
    windows: Sequence[int | None],
    *,
    keeps_logits: bool,
) -> Tensor:
    """Run as many `tokens` behind each of `buffers` as there are, in one pass; the logits, `(rows, vocabulary)`.

    The tokens are one sequence for all that looks at each token alone, and each row attends over its own buffer.
    """
    counts, device = [len(each) for each in tokens], buffers[0].layers[0].keys.device
    last = torch.tensor(list(accumulate(counts)), device=device) - 1
    positions = [range(each.length, each.length + count) for each, count in zip(buffers, counts, strict=True)]

    def attend(layer: int, query: Tensor, _key: Tensor, _value: Tensor, scale: float | None) -> Tensor:
        rows = zip(query.split_with_sizes(counts, 2), buffers, strict=True)
        return torch.cat([_seen(asked, each.layers[layer], windows[layer] or 0, scale) for asked, each in rows], dim=2)

    output = model(
        input_ids=torch.tensor(list(chain(*tokens)), device=device)[None],
        position_ids=torch.tensor(list(chain(*positions)), device=device)[None],
        past_key_values=_cache_of(buffers, counts),
        use_cache=True,
        kp_rows=attend,
        **({"logits_to_keep": last} if keeps_logits else {}),
    )
    logits: Tensor = output.logits[0]
    return logits.clone() if keeps_logits else logits[last]


def _seen(query: Tensor, held: BufferLayer, window: int, scale: float | None) -> Tensor:
    """Attention of the last tokens of one row, each over the last `window` tokens of its buffer; 0 is all of them."""
    new = query.shape[2]
    start = max(held.length - window - new + 1, 0) if window else 0
    keys, values = (side[:, :, start : held.length] for side in (held.keys, held.values))
    if new == 1 or not 0 < window < held.length:
        return causal_attention(query, keys, values, scale)
    at = torch.arange(keys.shape[2], device=query.device)
    behind = at[-new:, None] - at
    mask = (behind >= 0) & (behind < window)
    return _attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)


def _grouped(buffers: Sequence[KVBuffer]) -> list[tuple[list[int], int]]:
    """The rows that begin alike, and with how many tokens; 0 for a row that is alone."""
    groups, found = defaultdict[object, list[int]](list), []
    splits = buffers[0].layers[0].keys.device.type == "cpu"
    for row, buffer in enumerate(buffers):
        groups[_start(buffer) if splits else row].append(row)
    for rows in groups.values():
        runs = [buffers[row].runs for row in rows]
        shared = 0
        for same in zip(*runs, strict=False):
            if len(set(same)) > 1:
                break
            shared += same[0][1]
        if len(rows) > 1 and shared >= _SHARED:
            found.append((rows, shared))
        else:
            found += [([row], 0) for row in rows]
    return found


def _start(buffer: KVBuffer) -> object:
    """The runs that make the first `_SHARED` tokens of a buffer."""
    tokens = 0
    for at, (_, count) in enumerate(buffer.runs):
        tokens += count
        if tokens >= _SHARED:
            return tuple(buffer.runs[: at + 1])
    return id(buffer)


class _Group:
    """Rows that share their first tokens, with a copy of what each has behind them, padded to one length.

    Only in `layers`, the others have windows.
    """

    def __init__(self, buffers: Sequence[KVBuffer], rows: Sequence[int], shared: int, layers: Sequence[int]) -> None:
        self._buffers, self._shared, self._layers, self._room = buffers, shared, layers, 0
        self.index = torch.tensor(rows, device=buffers[0].layers[0].keys.device)
        self._rows = torch.arange(len(rows))
        self._tails: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self) -> None:
        """Before each step: where its tokens go, and what each row sees."""
        if not self._shared:
            return
        lengths = [buffer.length - self._shared for buffer in self._buffers]
        if max(lengths) >= self._room:
            self._room = max(lengths) + _ROOM
            self._tails = {at: self._copied(at, lengths) for at in self._layers}
        self._ends = torch.tensor(lengths)
        self._longest = max(lengths) + 1
        seen = torch.arange(self._longest) <= self._ends[:, None]
        self._mask = torch.where(seen, 0.0, -torch.inf).to(self._buffers[0].layers[0].keys.dtype)[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention of these rows."""
        held = self._buffers[0].layers[layer]
        if not self._shared:
            return _seen(query, held, 0, scale)
        own_keys, own_values = self._tails[layer]
        own_keys[self._rows, :, self._ends], own_values[self._rows, :, self._ends] = key[:, :, 0], value[:, :, 0]
        shared = held.keys[:, :, : self._shared], held.values[:, :, : self._shared]
        own = own_keys[:, :, : self._longest], own_values[:, :, : self._longest]
        return _joined(query, shared, own, self._mask, scale)

    def _copied(self, layer: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        held = [buffer.layers[layer] for buffer in self._buffers]
        sides = [(each.keys, each.values) for each in held]
        made = [side.new_zeros(len(held), side.shape[1], self._room, side.shape[3]) for side in sides[0]]
        for row, (own, tokens) in enumerate(zip(sides, lengths, strict=True)):
            for side, tail in zip(own, made, strict=True):
                tail[row, :, :tokens] = side[0, :, self._shared : self._shared + tokens]
        return made[0], made[1]


def _joined(
    query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: Tensor, scale: float | None
) -> Tensor:
    """Attention of `query`, `(rows, heads, 1, head_dim)`, over `shared` keys and each row's own."""
    rows, heads, _, dim = query.shape
    kv_heads = shared[0].shape[1]
    share = heads // kv_heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the one that gives log-sum-exp
    # Query heads that share a key head are rows of one matrix, and so are the sequences.
    grouped = query.reshape(rows, kv_heads, share, dim)
    asked = grouped.transpose(0, 1).reshape(1, kv_heads, rows * share, dim)
    before, weight_before = flash(asked, *shared, 0.0, False, scale=scale)  # noqa: FBT003
    bias = mask.expand(rows, 1, share, mask.shape[3])
    among, weight_among = flash(grouped, *own, 0.0, False, attn_mask=bias, scale=scale)  # noqa: FBT003
    before = before.reshape(kv_heads, rows, share, dim).transpose(0, 1)
    weight = weight_before.reshape(kv_heads, rows, share).transpose(0, 1) - weight_among.reshape(rows, kv_heads, share)
    precise = torch.promote_types(query.dtype, torch.float32)
    part = torch.sigmoid(weight)[..., None].to(precise)
    joined: Tensor = torch.lerp(among.to(precise), before.to(precise), part)
    return joined.to(query.dtype).reshape(rows, heads, 1, dim)


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
            layer.update(keys, values)
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
