"""Read and write KV in vLLM's paged cache, in any memory layout of the platform's attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.platforms import current_platform

from kp_core import KVTensors
from kp_core.errors import ModelError, PackError


def layer_names(names: Iterable[str]) -> list[str]:
    """The layer names of vLLM, sorted by the layer number that each contains."""
    return sorted(names, key=lambda name: next(int(part) for part in name.split(".") if part.isdigit()))


@dataclass(frozen=True)
class PagedKV:
    """The paged cache of one rank: per layer `(blocks, kv_heads, block_size, 2 * head_dim)`, K and V side by side.

    On the CPU, vLLM's kernels store a block in a layout of their own. Writing uses the platform's kernel. Reading
    applies the inverse permutation, which is found by packing a block of known numbers.

    Raises `ModelError` for caches of another form (latent or quantised ones).
    """

    layers: tuple[Tensor, ...]
    first_head: int = 0
    """Index of this rank's first head, if the heads are spread over ranks."""

    @classmethod
    def of(cls, caches: Mapping[str, Tensor], first_head: int = 0) -> PagedKV:
        """Build it from caches by layer name; the number in a name gives the layer."""
        numbered = layer_names(caches)
        for name in numbered:
            cache = caches[name]
            if cache.ndim != 4 or cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ModelError(
                    f"The KV cache of {name} has shape {tuple(cache.shape)} and dtype {cache.dtype}; expected (blocks, "
                    "kv_heads, block_size, 2 * head_dim) in float32, bfloat16 or float16. Serve it without --store."
                )
        return cls(tuple(caches[name] for name in numbered), first_head)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layers[0].shape[2]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the cache is in CPU memory."""
        return self.layers[0].device.type == "cpu"

    def write(self, layer: int, parts: Sequence[tuple[Tensor, Tensor]], blocks: Sequence[int]) -> None:
        """Write `parts` into one layer, from the start of the first of these blocks on.

        Positions behind the parts stay untouched: vLLM may already have written KV of the same step there, as it writes
        before it waits for a layer. `parts` are consecutive keys and values of all heads,
        `(kv_heads, tokens, head_dim)`. Raises `PackError` for KV of another shape or dtype than the model's.
        """
        cache, stop = self.layers[layer], 0
        heads = slice(self.first_head, self.first_head + cache.shape[1])
        for key, value in parts:
            if key.dtype != cache.dtype or len(key) < heads.stop or key.shape[2] + value.shape[2] != cache.shape[3]:
                raise PackError(f"Got KV of shape {tuple(key.shape)} and {key.dtype}, which is not that of this model.")
            places = torch.arange(stop, stop := stop + key.shape[1])
            slots = torch.tensor(blocks, dtype=torch.long)[places // self.block_size], places % self.block_size
            _write(cache, key[heads].transpose(0, 1), value[heads].transpose(0, 1), *slots)

    def read(self, blocks: Sequence[int], tokens: int) -> KVTensors:
        """KV of the first `tokens` tokens of these blocks, on the CPU."""
        ids = torch.tensor(blocks, dtype=torch.long, device=self.layers[0].device)
        order = self._order() if ids.device.type == "cpu" else None
        keys, values = [], []
        for cache in self.layers:
            paged = cache[ids]
            if order is not None:
                paged = paged.flatten(1)[:, order].view(paged.shape)
            joined = paged.transpose(0, 1).flatten(1, 2)[:, :tokens]
            half = joined.shape[-1] // 2
            keys.append(joined[..., :half].cpu().contiguous())
            values.append(joined[..., half:].cpu().contiguous())
        return KVTensors(tuple(keys), tuple(values))

    def _order(self) -> Tensor:
        """The permutation of a packed block: `packed[order]` is the block as it was written.

        Raises `ModelError` if packing changes the numbers themselves.
        """
        cache = self.layers[0]
        count = cache[0].numel()
        offsets = torch.zeros(count, dtype=torch.long)
        base, power = 128, 1  # Every dtype holds integers below 128 exactly.
        while power < count:
            digits = (torch.arange(count) // power % base).to(cache.dtype)
            block = digits.view(1, *cache.shape[1:]).clone()
            current_platform.pack_kv_cache(block, torch.tensor([0]))
            offsets += block.flatten().long() * power
            power *= base
        order = torch.argsort(offsets)
        if not torch.equal(offsets[order], torch.arange(count)):
            raise ModelError(
                "vLLM's attention on this machine does not keep keys and values as they are, so they cannot be read."
            )
        return order


def _write(cache: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Write tokens `(tokens, kv_heads, head_dim)` at these offsets of these blocks."""
    count, heads, size, width = cache.shape
    if cache.device.type != "cpu":
        places = blocks.to(cache.device), slice(None), offsets.to(cache.device)
        cache[places] = torch.cat([keys, values], -1).to(cache.device)
        return
    # vLLM builds for other devices may lack these.
    from vllm._custom_ops import cpu_attn_reshape_and_cache
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(cache.dtype, size, width // 2)
    halves = cache.view(count, heads, 2 * size, width // 2).chunk(2, dim=2)
    cpu_attn_reshape_and_cache(keys, values, *halves, blocks * size + offsets, isa)
