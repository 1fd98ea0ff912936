"""`kp serve` before vLLM starts, and `kp build` by a server."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kp_core import PackStore
from kp_core.engines.hf.loading import bundled_model
from tests.cli.conftest import Kp, as_json
from tests.serve.gate import Served, address, server

__all__ = ["address", "server"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--host", "0.0.0.0"), "no keys; expected keys"),  # noqa: S104 - refused
        (("--", "--host", "0.0.0.0"), "--host among the options of vLLM"),  # noqa: S104 - refused
        (("--", "--hos=0.0.0.0"), "--hos among the options of vLLM"),
        (("--", "--kv_transfer_config.kv_connector", "Mine"), "--kv-transfer-config among"),
        (("--", "--max-model-len", "8", "--kv_cache_dtype=fp8_e4m3"), "--kv-cache-dtype among the options"),
        (("--facts", "other"), "holds other things"),
        (("--store", "s3://nowhere/packs"), "KP_SECRET"),
        (("--namespace", "A"), "expected 1 to 64 characters"),
        (("--", "--max-model-len", "8"), "needs vLLM, in an environment of its own, as it wants a transformers"),
    ],
)
def test_what_is_wrong_is_one_line_before_a_model_is_loaded(
    kp: Kp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("KP_SECRET", raising=False)
    monkeypatch.setattr("kp_cli.serving.find_spec", lambda _: None)  # Here vLLM may be.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").write_text("")
    code, out, err = kp("serve", "nowhere", "--store", "packs", *given)
    assert (code, out, err.count("\n"), said in err) == (1, "", 1, True), err
    assert not (tmp_path / "packs").exists()


def test_the_bundled_model_has_a_name(kp: Kp, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("kp_cli.serving.find_spec", lambda _: object())
    monkeypatch.setattr("kp_cli.serving.os.execv", lambda _, arguments: started.append(arguments))
    monkeypatch.setattr("os.environ", os.environ.copy())
    assert kp("serve", "bundled", "--store", "packs")[0] == 0
    [arguments] = started
    assert arguments[arguments.index("--model") + 1] == str(bundled_model())
    assert json.loads(os.environ["KP_SERVE"])["unresolved"] == "error"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), "4294967296"),
        (("--kv-cache-memory-bytes", "9"), "9"),
        (("--gpu_memory_utilization=0.5",), None),
    ],
)
def test_on_cpus_the_cache_takes_what_a_shared_machine_has(
    kp: Kp, monkeypatch: pytest.MonkeyPatch, given: Sequence[str], expected: str | None
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("kp_cli.serving.find_spec", lambda _: object())
    monkeypatch.setattr("kp_cli.serving.os.execv", lambda _, arguments: started.append(arguments))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.environ", os.environ.copy())
    assert kp("serve", "bundled", "--store", "packs", "--", *given)[0] == 0
    [arguments] = started
    parser = argparse.ArgumentParser()  # vLLM reads its options with one.
    parser.add_argument("--kv-cache-memory-bytes")
    assert parser.parse_known_args(arguments)[0].kv_cache_memory_bytes == expected


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "bank", "--store", "packs", "--facts", "other"),
        ("serve", "bank", "--store", "packs", "--packets"),
        ("ask", "bank", "Which bird?", "--model", "bank"),
        ("edit", "bank", "bird", "--old", "heron", "--new", "gull", "--model", "bank"),
        ("build", "new", "facts.jsonl", "--compile", "--model", "bank"),
    ],
)
def test_a_model_that_is_none_leaves_no_folder_behind(
    kp: Kp, bank: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kp_cli.serving.find_spec", lambda _: object())
    before = {path for path in bank.parent.rglob("*") if path.is_dir()}
    code, out, err = kp(*command)
    assert (code, out, "config" in err) == (1, "", True), err
    assert {path for path in bank.parent.rglob("*") if path.is_dir()} == before


def test_a_server_compiles_a_collection_and_goes_on_where_it_was_stopped(
    kp: Kp, bank: Path, server: Served, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KP_API_KEY", server.keys["default"])
    build = ("build", str(bank), "--compile", "--engine", address, "--packs", str(server.store.path), "--json")
    whole: Callable[[dict[str, Any]], None] = server._store

    def fails(body: dict[str, Any]) -> None:
        if server.computed == 2:
            raise KeyError("out of memory")
        whole(body)

    monkeypatch.setattr(server, "_store", fails)
    code, out, err = kp(*build)
    assert (code, json.loads(out)["error"], server.computed) == (1, "ModelError", 2)
    assert "500" in err.splitlines()[-1]
    monkeypatch.setattr(server, "_store", whole)
    plan = as_json(kp(*build))["plan"]
    assert (plan["packs"], plan["stored"], plan["server"], server.computed) == (2, 2, address, 4)
    plan = as_json(kp(*build))["plan"]
    assert (plan["packs"], plan["stored"], server.computed) == (0, 4, 4)
    # What is removed from the collection goes from the server's store.
    assert as_json(kp("remove", str(bank), "mill", "--packs", str(server.store.path), "--json"))["packs"] == 1


def test_a_store_of_its_own_and_a_text_that_is_too_long_stop_nothing(
    kp: Kp, bank: Path, server: Served, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KP_API_KEY", server.keys["default"])
    (bank.parent / "long.txt").write_text("word " * 700)
    code, out, err = kp("build", str(bank), "long.txt", "--max-chars", "9000", "--compile", "--engine", address)
    assert (code, server.computed) == (0, 4), err
    assert "is not compiled" in err
    assert "5 packs of" in out
    for compress in ("lossless", "none"):
        code, _, err = kp("build", str(bank), "--compile", "--engine", address, "--compress", compress)
        assert code == 2
        assert "`kp serve --compress` decides for a server" in " ".join(err.replace("│", " ").split())
    # What is removed from the collection goes from the server, whose handles are others.
    removed = next(handle for handle in server.store if "heron" in server.store.get(handle).text)
    assert removed not in PackStore(bank / "packs")
    monkeypatch.setenv("KP_API_KEY", "kp-wrong")
    code, _, err = kp("remove", str(bank), "bird")
    assert (code, "--unused` tries again" in " ".join(err.split())) == (1, True), err
    assert removed in server.store
    monkeypatch.setenv("KP_API_KEY", server.keys["default"])
    assert as_json(kp("remove", str(bank), "--unused", "--json"))["packs"] == 1
    assert removed not in server.store
    monkeypatch.setenv("KP_API_KEY", "kp-wrong")
    assert kp("build", str(bank), "--compile", "--engine", address)[0] == 1
