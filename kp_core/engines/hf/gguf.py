"""GGUF files, unpacked for transformers into a folder of the user's cache directory.

The weights are those that transformers itself would load, bit for bit: names and orders are its own, numbers the `gguf`
package's. They are written tensor by tensor, so that memory holds a shard and a tensor, never a model.
"""

from __future__ import annotations

import json
import logging
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as theirs

from kp_core.engines.hf.identity import stamp_files
from kp_core.engines.hf.kinds import kind_of
from kp_core.errors import ModelError
from kp_core.progress import bar_of

try:  # Newer releases of transformers read some architectures in another way.
    from transformers.integrations.gguf import GGUF_ARCHS as _READ_WHOLE
except ImportError:
    _READ_WHOLE = {}

logger = logging.getLogger(__name__)

_SHARD = 320 * 2**20  # Bytes of tensors that wait to be written as one file; the bundled model is one.
_ELEMENTS = 2**22  # Elements that are dequantised at once.
_reading = threading.Lock()


def unpack(file: Path, dtype: torch.dtype, target: Path) -> None:
    """Write the GGUF file into the folder `target`, as `from_pretrained` reads it, in `dtype`."""
    before = stamp_files(file)
    try:
        with _read_once():
            reader = gguf.GGUFReader(str(file))
            needed = dtype.itemsize * sum(prod(map(int, tensor.shape)) for tensor in reader.tensors)
            if (free := shutil.disk_usage(target).free) < needed:
                raise ModelError(
                    f"Unpacked, {file.name} takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free in "
                    f"{target.parent}. Make room there, or set KP_CACHE to a folder on another disk."
                )
            logger.warning("Unpacking %s once, to %.1f GB in %s.", file.name, needed / 1e9, target.parent)
            place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
            config = AutoConfig.from_pretrained(**place)
            kind_of(config)
            try:
                AutoTokenizer.from_pretrained(**place).save_pretrained(target)
            except (ValueError, ImportError, KeyError) as error:
                logger.warning("The tokenizer of %s cannot be read, pass `tokenizer=`: %s", file.name, error)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            config.dtype, config.architectures = dtype, [type(model).__name__]
            config.save_pretrained(target)
            model.generation_config.save_pretrained(target)
            if theirs.read_field(reader, "general.architecture")[0] in _READ_WHOLE:
                save_model(
                    AutoModelForCausalLM.from_pretrained(**place, dtype=dtype), str(target / "model.safetensors")
                )
            else:
                _write(_tensors(reader, file, model, dtype), target, bar_of(f"Unpacking {file.name}", needed, "B"))
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, struct.error) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"Could not load {str(file)!r}: {reason}. If the file is cut or damaged, download it again. What "
            "transformers does not know, llama.cpp may run (`engine='llama'`)."
        ) from error
    if stamp_files(file) != before:
        raise ModelError(f"{str(file)!r} changed while it was unpacked. Load it again when it is whole.")


def _tensors(
    reader: gguf.GGUFReader, file: Path, model: PreTrainedModel, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors by the names of transformers, which makes some of several in the file."""
    config, architecture = (
        theirs.load_gguf_checkpoint(str(file))["config"],
        theirs.read_field(reader, "general.architecture")[0],
    )
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=config)
    is_plain = type(processor).process is theirs.TensorProcessor.process
    names = theirs.get_gguf_hf_weights_map(model, processor)
    parts, made = Counter(names.values()), dict[str, Tensor]()  # Of how many a tensor is made, and those not whole yet.
    for tensor in reader.tensors:
        shape, name = tuple(map(int, reversed(tensor.shape))), names.get(tensor.name)
        if is_plain and name and len(shape) > 1:  # Then it is never whole in float32.
            made[name] = torch.empty(shape, dtype=dtype)
            for row in range(0, shape[0], step := max(1, _ELEMENTS // prod(shape[1:]))):
                rows = gguf.dequantize(tensor.data[row : row + step], tensor.tensor_type)
                made[name][row : row + step] = torch.from_numpy(rows.copy())
        else:
            done = processor.process(
                weights=gguf.dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": made},
            )
            if done.name in names:
                made[names[done.name]] = torch.from_numpy(np.copy(done.weights))
        parts[name or names.get(tensor.name.removesuffix(".weight"))] -= 1
        yield from [(whole, made.pop(whole).to(dtype)) for whole in [*made] if parts[whole] <= 0]
    yield from ((name, tensor.to(dtype)) for name, tensor in made.items())


def _write(tensors: Iterator[tuple[str, Tensor]], target: Path, bar: tqdm[Any]) -> None:
    """Write tensors into as many files as they need, with the index that transformers reads."""
    waiting, files = dict[str, Tensor](), dict[str, str]()

    def flush() -> None:
        file = f"model-{len({*files.values()}) + 1:05}.safetensors"
        save_file(waiting, target / file, {"format": "pt"})
        files.update(dict.fromkeys(waiting, file))
        waiting.clear()

    with bar:
        for name, tensor in tensors:
            if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > _SHARD:
                flush()
            waiting[name] = tensor
            bar.update(tensor.nbytes)
    flush()
    if len({*files.values()}) == 1:
        (target / files[name]).rename(target / "model.safetensors")
    else:
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The same several times faster: each slice of numpy's memory map is an object of its own class."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:  # noqa: ANN401
        if self.byte_order != "I" or not count:
            return super()._get(offset, dtype, count, override_order)
        return np.frombuffer(self.data, dtype, int(count), int(offset))


@contextmanager
def _read_once() -> Iterator[None]:
    """Within, the same file is read once: transformers reads its vocabulary for each of config, tokenizer, weights."""
    with _reading:
        before = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(_Reader), cache(gguf.get_tensor_name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = before
