"""The command for accelerators: on a CPU, with nothing installed but what a bare machine has, it runs every part."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.gpu import speed
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import DeviceLostError, Report

_ROOT = Path(__file__).parents[2]
_INSTALLED = ("torch", "transformers", "accelerate", "peft", "pytest", "xxhash")
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def _with_dependencies(names):
    """These distributions and all that they need, without extras."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.split(r"[\s;<>=!\[\(~]", waiting.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # Of another system.
            continue
        waiting += [needed for needed in found[name].requires or () if "extra ==" not in needed]
    return found


@pytest.fixture
def bare(tmp_path):
    """Runs Python in the repository with these packages alone, without a network."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for distribution in _with_dependencies(_INSTALLED).values():
        for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            link = packages / top
            if not link.exists():
                link.symlink_to(distribution.locate_file(top))
    environment = {"PYTHONPATH": f"{packages}{os.pathsep}{_ROOT}", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments):
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)  # noqa: S603

    return run


@pytest.mark.slow
def test_every_part_runs_on_a_bare_machine_without_an_accelerator(bare, tmp_path):
    assert "No module named 'zstandard'" in bare("-c", "import zstandard").stderr  # What is not named is not there.
    out = tmp_path / "out" / "gpu.json"
    done = bare("-m", "benchmarks.gpu", "--device", "cpu", "--shape", "tiny", "--minutes", "2", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    parity, timed, rows = figures["parity"], figures["speed"], figures["rows"]
    assert figures["parity_differs"] == []
    assert {"llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_next"} <= {row["model"] for row in parity}
    assert {row["dtype"] for row in parity} == {"float32", "bfloat16", "float16"}
    plain = parity[0]
    assert {plain[name] for name in ("exact", "naive", "splice")} == {"right"}
    ways = {plain[name] for name in ("memory", "host", "disk", "turn", "batch", "select", "steered")}
    assert ways == {"bits"} or not plain["bitwise"]
    assert [row["tokens"] for row in timed if "memory_s" in row] == [256, 1024]
    for column in ("device_gb_s", "eight_tok_s", "static_tok_s", "splice_first_s", "kernels", "plain_s", "pinned_s"):
        assert any(row.get(column) for row in timed), column
    assert {"alike", "mask_ms"} <= {name for row in rows for name in row}
    assert {row["attention"] for row in rows if "attention" in row} == {"flash", "math"}
    # What the CPU has not is said.
    assert {line.partition(":")[0] for line in figures["cannot"] if "parity" not in line} == {
        "rows of efficient attention",
        "rows of cudnn attention",
    }
    assert "memory/floor" in out.with_suffix(".txt").read_text()


def report(path, device="cpu"):
    return Report(path, 1.0, torch.device(device), {})


def test_rows_are_kept_as_they_come_and_an_error_costs_one_line(tmp_path, capsys):
    found = report(tmp_path / "gpu.json")
    with found.trying("one"):
        found.add("parity", {"model": "llama"})
        raise ValueError("no such kernel\nand more")
    with found.trying("other"):
        found.add("parity", {"model": "qwen3"})
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["model"] for row in kept["parity"]] == ["llama", "qwen3"]
    assert kept["cannot"] == ["one: ValueError: no such kernel"]
    assert capsys.readouterr().out == "Not run: one: ValueError: no such kernel\n"


@no_accelerator
def test_a_device_that_is_gone_ends_the_run_and_keeps_the_rows(tmp_path):
    found = report(tmp_path / "gpu.json", "cuda")
    found.add("parity", {"model": "llama"})
    with pytest.raises(DeviceLostError), found.trying("one"):
        torch.zeros(1, device="cuda")
    assert json.loads((tmp_path / "gpu.json").read_text())["parity"] == [{"model": "llama"}]


@no_accelerator
@pytest.mark.parametrize("arguments", [(), ("--device", "cuda"), ("--device", "mps"), ("--device", "nonsense")])
def test_without_a_device_one_line_says_so(arguments, tmp_path, capsys):
    assert main([*arguments, "--json", str(tmp_path / "gpu.json")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("No device: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_of_a_shape_that_does_not_fit_the_next_smaller_is_taken(tmp_path, monkeypatch, capsys):
    huge = LlamaConfig(vocab_size=64, hidden_size=1 << 17, intermediate_size=1 << 17, num_hidden_layers=4)
    monkeypatch.setattr(speed, "SHAPES", {"huge": lambda: huge, "tiny": speed.SHAPES["tiny"]})
    assert list(speed.fitting(report(tmp_path / "gpu.json"), "huge")) == ["tiny"]
    said = capsys.readouterr().out
    assert re.fullmatch(r"Not run: huge: it needs [\d.]+ GB, and [\d.]+ GB are free; trying a smaller shape\n", said)


def test_an_interruption_keeps_the_rows_and_shows_them(tmp_path, capsys, monkeypatch):
    """Ctrl-C, as soon as the first row is there."""
    out, write = tmp_path / "gpu.json", Report.add

    def add(self, part, row):
        write(self, part, row)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Report, "add", add)
    # A shell has what it starts in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main(["--device", "cpu", "--parts", "rows", "--minutes", "9", "--json", str(out)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130
    rows = json.loads(out.read_text())["rows"]
    assert 0 < len(rows) < 10
    assert "Interrupted. What was measured before is in" in capsys.readouterr().out
    assert rows[0]["alike"] in out.with_suffix(".txt").read_text()


@no_accelerator
@pytest.mark.parametrize("arguments", [(), ("--device", "cuda")])
def test_a_driver_that_is_too_old_is_named(arguments, tmp_path, capsys, monkeypatch):
    """As torch says it: it warns once, and then has no device."""
    old = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."

    def is_available():
        warnings.warn(old, stacklevel=2)
        return False

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert main([*arguments, "--json", str(tmp_path / "gpu.json")]) == 1
    said = capsys.readouterr().out
    assert said == f"No device: {old} To try the command on a CPU: --device cpu --shape tiny --minutes 2\n"
