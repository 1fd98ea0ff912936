"""GGUF files, unpacked by transformers into a folder of the user's cache directory."""

from __future__ import annotations

import logging
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import logging as logs

from kp_core.engines.hf.identity import stamp_files
from kp_core.engines.hf.kinds import kind_of
from kp_core.errors import ModelError

logger = logging.getLogger(__name__)

_reading = threading.Lock()


def unpack(file: Path, dtype: torch.dtype, target: Path) -> None:
    """Write the GGUF file into the folder `target`, as `from_pretrained` reads it, in `dtype`."""
    before = stamp_files(file)
    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        with _read_once():
            elements = sum(prod(map(int, tensor.shape)) for tensor in gguf.GGUFReader(str(file)).tensors)
            needed = dtype.itemsize * elements
            if (free := shutil.disk_usage(target).free) < needed:
                raise ModelError(
                    f"Unpacked, {file.name} takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free in "
                    f"{target.parent}. Make room there, or set KP_CACHE to a folder on another disk."
                )
            logger.warning("Unpacking %s once, to %.1f GB in %s.", file.name, needed / 1e9, target.parent)
            kind_of(AutoConfig.from_pretrained(**place))
            try:
                AutoTokenizer.from_pretrained(**place).save_pretrained(target)
            except (ValueError, ImportError, KeyError) as error:
                logger.warning("The tokenizer of %s cannot be read, pass `tokenizer=`: %s", file.name, error)
            model = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype)
        for owner, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            vars(owner).pop(mark, None)  # Its weights are plain numbers now.
        model.save_pretrained(target)
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, struct.error) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"Could not load {str(file)!r}: {reason}. If the file is cut or damaged, download it again. What "
            "transformers does not know, llama.cpp may run (`engine='llama'`)."
        ) from error
    if stamp_files(file) != before:
        raise ModelError(f"{str(file)!r} changed while it was unpacked. Load it again when it is whole.")


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The same several times faster: each slice of numpy's memory map is an object of its own class."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:  # noqa: ANN401
        if self.byte_order != "I" or not count:
            return super()._get(offset, dtype, count, override_order)
        return np.frombuffer(self.data, dtype, int(count), int(offset))


@contextmanager
def _read_once() -> Iterator[None]:
    """Within, the same file is read once: transformers reads its vocabulary for each of config, tokenizer, weights.

    It also warns that packed weights are slow in bfloat16, which these do not stay.
    """
    with _reading:
        before, verbosity = (gguf.GGUFReader, gguf.get_tensor_name_map), logs.get_verbosity()
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(_Reader), cache(gguf.get_tensor_name_map)
        logs.set_verbosity_error()
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = before
            logs.set_verbosity(verbosity)
