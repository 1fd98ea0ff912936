"""Selective scan of Mamba, Falcon Mamba, Jamba and Zamba 1 from a state; that of transformers begins at zero."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["scan_from_states"]

_SCAN = "mamba_selective_scan"
_NONE = (lambda: None).__code__
_HEADS = 4
"""Number of dimensions of a state with heads."""


def scan_from_states(model: nn.Module) -> int:
    """Make the selective scans of `model` start from the cached state; returns the number of mixers changed.

    The classes stay unchanged: each mixer object runs the code of its class with another scan function.
    """
    mixers = [
        module for module in model.modules() if _SCAN in getattr(_own_forward(module), "__code__", _NONE).co_names
    ]
    for mixer in mixers:
        vars(mixer)["forward"] = _going_on(mixer)
    return len(mixers)


def _own_forward(module: nn.Module) -> FunctionType:
    function: FunctionType = inspect.unwrap(type(module).forward)
    return function


def _going_on(mixer: Any) -> Callable[..., Tensor]:  # noqa: ANN401 - a mixer of one of several classes
    plain, original = mixer.forward, _own_forward(mixer)
    scan = original.__globals__[_SCAN]

    def forward(hidden_states: Tensor, cache_params: Any = None, **more: Any) -> Tensor:  # noqa: ANN401
        state = None if cache_params is None else cache_params.get_recurrent_state(mixer.layer_idx)
        if state is None or hidden_states.shape[1] == 1:
            output: Tensor = plain(hidden_states, cache_params=cache_params, **more)
            return output
        # Zamba has heads, and scans them one after the other.
        parts = iter(state.unbind(1) if state.ndim == _HEADS else [state])
        namespace = {
            **original.__globals__,
            _SCAN: lambda *inputs, **options: _scan(scan, next(parts), *inputs, **options),
        }
        patched = FunctionType(
            original.__code__, namespace, original.__name__, original.__defaults__, original.__closure__
        )
        continued: Tensor = patched(mixer, hidden_states, cache_params=cache_params, **more)
        return continued

    return forward


def _scan(  # noqa: PLR0913 - the signature of transformers
    plain: Callable[..., tuple[Tensor, Tensor]],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - the paper's name
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    **more: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    """The output of a scan that starts from `state`, `(batch, channels, state size)`, and the state at its end.

    `hidden_states`, `dt` and `z` are `(batch, channels, tokens)`, `A` is `(channels, state size)`, `B` and `C` are
    `(batch, state size, tokens)`. A scan is linear in its initial state: the result is that of `plain` from a zero
    state, plus the decayed initial state (Mamba, arXiv 2312.00752, section 3).
    """
    options = {**more, "delta_bias": delta_bias, "return_last_state": True}
    output, last_state = plain(hidden_states, dt, A, B, C, D=D, z=None, **options)
    steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
    steps = (nn.functional.softplus(steps) if more.get("delta_softplus") else steps).cumsum(dim=-1)
    total, final_states = output.float(), []
    for at in range(A.shape[1]):
        decayed = torch.exp(A[None, :, at, None].float() * steps) * state[:, :, at, None].float()
        total = total + decayed * C[:, None, at].float()
        final_states.append(decayed[..., -1])
    if z is not None:
        total = total * nn.functional.silu(z.float())
    return total.to(output.dtype), last_state + torch.stack(final_states, dim=-1).to(last_state.dtype)
