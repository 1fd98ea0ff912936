"""KV in and out of vLLM's paged cache, whatever order the platform's attention keeps it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.platforms import current_platform

from kp_core.errors import UnsupportedModelError
from kp_core.kv import KVTensors

__all__ = ["PagedKV"]


@dataclass(frozen=True)
class PagedKV:
    """The cache of one rank: per layer `(blocks, kv_heads, block_size, 2 * head_dim)`, K and V side by side.

    On CPU vLLM's kernels keep a block in an order of their own: what is written as above is brought into that order by
    the platform, and what is read is brought back by its inverse, which is found by ordering numbers.

    Raises `UnsupportedModelError` for caches of another form (latent or quantised ones).
    """

    layers: tuple[Tensor, ...]
    first_head: int = 0
    """Of a cache that is spread over ranks, the first head of this one."""

    @classmethod
    def of(cls, caches: Mapping[str, Tensor], first_head: int = 0) -> PagedKV:
        """The caches by the names of their layers, which number them."""
        numbered = sorted(caches, key=lambda name: next(int(part) for part in name.split(".") if part.isdigit()))
        for name in numbered:
            cache = caches[name]
            if cache.ndim != 4 or cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UnsupportedModelError(
                    f"The KV cache of {name} has shape {tuple(cache.shape)} and dtype {cache.dtype}; expected (blocks, "
                    "kv_heads, block_size, 2 * head_dim) in float32, bfloat16 or float16. Serve it without --store."
                )
        return cls(tuple(caches[name] for name in numbered), first_head)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layers[0].shape[2]

    def fits(self, kv: KVTensors) -> bool:
        """Whether `kv`, of all heads, is of this model's shape and dtype."""
        heads = self.first_head + self.layers[0].shape[1]
        return (
            kv.layers == len(self.layers)
            and kv.dtype == self.layers[0].dtype
            and all(
                key.shape[0] >= heads and key.shape[2] + value.shape[2] == cache.shape[3]
                for key, value, cache in zip(kv.keys, kv.values, self.layers, strict=True)
            )
        )

    def write(self, kv: KVTensors, blocks: Sequence[int]) -> None:
        """Write the tokens of `kv` from the first place of the first of these blocks on."""
        size, device = self.block_size, self.layers[0].device
        ids = torch.tensor(blocks, dtype=torch.long, device=device)
        room = len(blocks) * size - kv.tokens
        for key, value, cache in zip(kv.keys, kv.values, self.layers, strict=True):
            heads = slice(self.first_head, self.first_head + cache.shape[1])
            joined = torch.nn.functional.pad(torch.cat([key[heads], value[heads]], -1), (0, 0, 0, room))
            paged = joined.view(cache.shape[1], len(blocks), size, -1).transpose(0, 1)
            cache[ids] = paged.to(device)
            if device.type == "cpu":
                current_platform.pack_kv_cache(cache, ids)

    def read(self, blocks: Sequence[int], tokens: int) -> KVTensors:
        """The first `tokens` tokens of these blocks, on the CPU."""
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
        """Where each number of a block lies in it: `packed[order]` is the block as it was written."""
        cache = self.layers[0]
        count = cache[0].numel()
        found = torch.zeros(count, dtype=torch.long)
        base, power = 128, 1  # Whole numbers that every dtype holds.
        while power < count:
            digits = (torch.arange(count) // power % base).to(cache.dtype)
            block = digits.view(1, *cache.shape[1:]).clone()
            current_platform.pack_kv_cache(block, torch.tensor([0]))
            found += block.flatten().long() * power
            power *= base
        order = torch.argsort(found)
        if not torch.equal(found[order], torch.arange(count)):
            raise UnsupportedModelError(
                "vLLM's attention on this machine does not keep keys and values as they are, so they cannot be read."
            )
        return order
