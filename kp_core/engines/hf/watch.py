"""Detects changes to a model and to the adapters on it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kp_core.errors import ModelChangedError

__all__ = ["ModelWatch", "adapter_state"]

_TABLES = ("_modules", "_parameters", "_buffers")
_PLAIN = (Tensor, torch.nn.Parameter)
_SAMPLE = 64  # Bytes.


def adapter_state(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """By path of each adapted module: the names, activation, scale and merging of its adapters.

    Empty for a model without peft adapters.
    """
    return {
        path: {name: value for name, value in vars(module).items() if _says_what_acts(name) and _is_plain(value)}
        for path, module in model.named_modules()
        if "_disable_adapters" in vars(module)
    }


class ModelWatch:
    """Detects when the owner of a model that an engine uses trains, adapts or moves it, or replaces parts of it.

    A check takes a fraction of a millisecond. It compares versions and addresses of tensors, some bytes of each tensor
    on the CPU, the modules and the state of adapters. A write through `.data` to other bytes is not detected.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = dict(model.named_modules())
        tables = [
            (path, table) for path, module in modules.items() for kind in _TABLES if (table := vars(module)[kind])
        ]
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        samples = [(name, sample) for name, tensor in tensors.items() if (sample := _sample(tensor)) is not None]
        adapters = adapter_state(model)
        self._adapters = [(vars(modules[path]), tuple(state)) for path, state in adapters.items()]
        self._tables, self._tensors = [table for _, table in tables], list(tensors.values())
        self._samples = [sample for _, sample in samples]
        self._names = [*adapters, *(path for path, _ in tables), *tensors, *(name for name, _ in samples)]
        # Objects are compared by id. They are kept alive, because Python reuses ids.
        self._kept = [list(table.values()) for table in self._tables]
        self._before = copy.deepcopy(self._state())

    def check(self) -> None:
        """Raise `ModelChangedError`, naming a module or tensor, when the model has changed."""
        state = self._state()
        if state == self._before:
            return
        name = next(name for name, new, old in zip(self._names, state, self._before, strict=True) if new != old)
        raise ModelChangedError(
            f"The model was changed while an engine runs it, first at {name!r}: its weights, its modules or the state "
            "of its adapters. The engine's packs and cache belong to the model as it was. `session.refresh()` "
            "takes it as it is now; or make a new engine with `load_engine(model, tokenizer=...)`, or undo the change "
            "(a disabled adapter can be enabled again)."
        )

    def _state(self) -> list[object]:
        return [
            *([entries.get(name) for name in names] for entries, names in self._adapters),
            *([*map(id, table.values())] for table in self._tables),
            *map(_version, self._tensors),
            *map(bytes, self._samples),
        ]


def _says_what_acts(name: str) -> bool:
    return name in ("_active_adapter", "_disable_adapters") or (not name.startswith("_") and name != "training")


def _is_plain(value: object) -> bool:
    """Whether a value is plain data, which has a stable form."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _version(tensor: Tensor) -> tuple[int, int]:
    version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name
    # Quantised tensors of other types may have no storage of their own.
    return version, tensor.data_ptr() if type(tensor) in _PLAIN else 0


def _sample(tensor: Tensor) -> memoryview | None:
    """View of some bytes from the middle of a tensor; `None` unless it is a plain contiguous tensor on the CPU."""
    if type(tensor) not in _PLAIN or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    raw = tensor.detach().view(-1).view(torch.uint8)
    middle = raw.numel() // 2
    return raw[middle : middle + _SAMPLE].numpy().data
