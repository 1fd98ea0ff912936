"""Which arithmetic of the device gives a row the same bits whatever the number of rows, and what padding costs.

One arithmetic on an accelerator would need this: reused KV has the bits of computed KV only where a token's result
depends on no other token of its pass (`kp_core.engines.hf.probe`, which tests the same on a CPU).

- layers: products in the shapes of an 8B model. `alike`: numbers of rows in groups that give a row the same bits.
  `others`: whether at one number of rows a row's bits depend on the values of the others, and on its place among them.
- attention: the same for each kernel of torch, over keys of one length, by the number of new tokens.
- padded: products of few rows padded to a fixed number, in microseconds. A pass aligned to fixed positions and padded
  to so many rows would be row-invariant wherever `others` is `no`.
- masks: attention of 1,024 tokens behind others, milliseconds: with a mask and keys repeated for each head, as the
  engine computes it on an accelerator, and with a causal bias aligned to the end, which needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.report import Report, synchronise
from benchmarks.gpu.speed import seconds_of

__all__ = ["run"]

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PADDED = (16, 64, 256)
_LAYERS = {"query": (4096, 4096), "key": (4096, 1024), "up": (4096, 12288), "down": (12288, 4096)}
_SMALL = {"query": (64, 64), "down": (96, 64)}
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_HEADS, _KV_HEADS, _DIM = 32, 8, 128


@torch.inference_mode()
def run(report: Report) -> None:
    """All rows, while there is time."""
    device = report.device
    is_small = device.type == "cpu"
    counts = _COUNTS[:6] if is_small else _COUNTS
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    try:
        for dtype in dtypes if device.type != "mps" else dtypes[1:]:
            for name, (width, out) in (_SMALL if is_small else _LAYERS).items():
                with report.trying(f"rows of {name} in {dtype}"):
                    report.add("rows", _layer(name, width, out, counts, dtype, device))
        for name, backend in _BACKENDS.items():
            if not report.has_time(1.0):
                report.cannot(f"rows of {name} attention", "no time left")
                continue
            with report.trying(f"rows of {name} attention"), sdpa_kernel(backend):
                report.add("rows", _attention(name, counts, 512 if is_small else 4096, device))
        with report.trying("masks"):
            for stop in (512, 1024) if is_small else (1024, 4096, 32768):
                report.add("rows", _masks(stop, 256 if is_small else 1024, device))
    finally:
        report.show("rows")


def _layer(  # noqa: PLR0913 - the sizes of a layer, and where it is
    name: str, width: int, out: int, counts: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    weight = _spread(out, width, dtype=dtype, device=device)
    rows = _spread(counts[-1], width, dtype=dtype, device=device)
    row = {"layer": name, "dtype": str(dtype).removeprefix("torch."), "shape": f"{width}x{out}"}
    row |= _invariance(rows, counts, lambda part: nn.functional.linear(part, weight))
    for count in _PADDED:
        padded = rows[: min(count, len(rows))]
        row[f"{count}_us"] = 1e6 * seconds_of(lambda padded=padded: nn.functional.linear(padded, weight), device)
    return row | {"1_us": 1e6 * seconds_of(lambda: nn.functional.linear(rows[:1], weight), device)}


def _attention(name: str, counts: tuple[int, ...], stop: int, device: torch.device) -> dict[str, Any]:
    dtype = torch.float16 if device.type == "mps" else torch.bfloat16
    key, value = (_spread(1, _HEADS, stop, _DIM, dtype=dtype, device=device) for _ in range(2))
    queries = _spread(counts[-1], _HEADS, _DIM, dtype=dtype, device=device)

    def attend(part: Tensor) -> Tensor:
        query = part.transpose(0, 1)[None]
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        return output[0].transpose(0, 1)

    return {"attention": name, "keys": stop, **_invariance(queries, counts, attend)}


def _invariance(rows: Tensor, counts: tuple[int, ...], compute: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """Which numbers of rows give the first row the same bits, and whether the other rows matter at one number."""
    groups: list[tuple[Tensor, list[int]]] = []
    for count in counts:
        first = compute(rows[:count])[0]
        for bits, members in groups:
            if torch.equal(bits, first):
                members.append(count)
                break
        else:
            groups.append((first, [count]))
    alike = " | ".join(f"{members[0]}-{members[-1]}" if members[1:] else f"{members[0]}" for _, members in groups)
    part = rows[: counts[-2]]
    expected, others, rolled = compute(part), part.clone(), part.roll(1, 0)
    others[1:] = 0
    values, places = not torch.equal(compute(others)[0], expected[0]), not torch.equal(compute(rolled)[1], expected[0])
    matters = [name for name, holds in (("values", values), ("places", places)) if holds]
    return {"alike": alike, "others": ", ".join(matters) or "no"}


def _masks(stop: int, new: int, device: torch.device) -> dict[str, Any]:
    dtype = torch.float16 if device.type == "mps" else torch.bfloat16
    query = _spread(1, _HEADS, new, _DIM, dtype=dtype, device=device)
    key, value = (_spread(1, _KV_HEADS, stop, _DIM, dtype=dtype, device=device) for _ in range(2))
    attend = nn.functional.scaled_dot_product_attention

    def masked() -> Tensor:
        visible = torch.arange(stop, device=device) <= torch.arange(stop - new, stop, device=device)[:, None]
        keys, values = (side.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for side in (key, value))
        return attend(query, keys, values, attn_mask=visible)

    def aligned() -> Tensor:
        return attend(query, key, value, attn_mask=causal_lower_right(new, stop), enable_gqa=True)

    row: dict[str, Any] = {"new": new, "keys": stop, "mask_ms": 1e3 * seconds_of(masked, device)}
    try:
        expected, found = masked().float(), aligned().float()
        error = float((found - expected).norm() / expected.norm())
        row |= {"aligned_ms": 1e3 * seconds_of(aligned, device), "error": error}
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as why:
        row |= {"aligned_ms": None, "error": str(why).partition("\n")[0][:80]}
    synchronise(device)
    return row


def _spread(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers that differ strongly in size, where the order of additions changes the sum."""
    torch.manual_seed(0)
    plain = torch.randn(*shape, device=device)
    return (plain * torch.exp(torch.randn(*shape, device=device))).to(dtype)
