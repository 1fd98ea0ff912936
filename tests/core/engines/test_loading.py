"""Which model it is, from files and objects; what is refused before it is loaded; what is noticed while it runs."""

import copy
import io
import json
import os
import shutil
import socket
import sys
import warnings

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from kp_core import load_engine
from kp_core.engines.hf import identity, probe
from kp_core.engines.hf.identity import identity_of, load_tokenizer
from kp_core.engines.hf.kinds import cache_parameter
from kp_core.engines.hf.loading import bundled_model, load, load_session, watched
from kp_core.engines.hf.probe import probed
from kp_core.engines.local.buffer import KVBuffer, default_cache_bytes, memory_bytes
from kp_core.errors import ModelError, PackError
from kp_core.packs.fingerprint import NUMERICS
from kp_core.prompt.template import ChatTemplate
from tests.kits import ARCHITECTURES, tiny_model, tiny_tokenizer
from tests.matrix import architectures

TEXT = "The bell of Veyl rings at nine."


def engine_of(model, **settings):
    return load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=16, cache_bytes=1_000_000, **settings)


def with_lora(alpha=8, seed=0, model=None, **settings):
    """A tiny Llama with an adapter that does something: the weights peft starts with do nothing."""
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], **settings)
    adapted = get_peft_model(tiny_model("llama") if model is None else model, config)
    torch.manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_()
    return adapted


def save(folder, model=None, **settings):
    (tiny_model("llama") if model is None else model).save_pretrained(folder, **settings)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Identity


@architectures
def test_a_folder_its_engine_and_the_object_it_was_saved_from_are_one_model(architecture, tmp_path):
    model = tiny_model(architecture)
    save(tmp_path, model)
    alone = identity_of(tmp_path)
    loaded = load_engine(tmp_path, device="cpu", dtype="float32").fingerprint
    assert loaded.identity == alone.identity
    assert set(loaded.diff(alone)) == set(NUMERICS)
    # Some tensors are saved under other names than they have in memory, or split.
    renamed = {"weights"} if architecture in ("gpt_neox", "qwen3_moe") else set()
    given = load_engine(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)).fingerprint
    assert set(given.diff(loaded)) == renamed


def test_a_folder_may_lie_in_the_home_directory(tmp_path, monkeypatch):
    folder = save(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_engine("~/model", device="cpu").fingerprint == load_engine(folder, device="cpu").fingerprint


def test_the_dtype_of_loading_is_no_part_of_the_identity(tmp_path):
    save(tmp_path)
    one, other = (load_engine(tmp_path, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert one.fingerprint.diff(other.fingerprint) == {"dtype": ("float32", "bfloat16")}
    pack = one.build_pack(TEXT)
    with pytest.raises(PackError, match="by this model with other numerics"):
        other.generate("Who?", packs=[pack])


def test_the_bundled_model_is_identified_by_its_files(smol):
    assert identity_of(bundled_model()).same_model(smol.fingerprint)


def test_sharding_does_not_matter(tmp_path):
    whole, parts = save(tmp_path / "whole"), save(tmp_path / "parts", max_shard_size="20KB")
    assert len([*parts.glob("*.safetensors")]) > 1
    assert identity_of(whole) == identity_of(parts)


def test_tied_tensors_count_once(tmp_path):
    config = ARCHITECTURES["llama"]()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert engine_of(model).fingerprint.same_model(identity_of(save(tmp_path, model)))


def test_what_varies_between_releases_does_not_matter(tmp_path):
    save(tmp_path)
    before = identity_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    older = {name: value for name, value in config.items() if name not in ("transformers_version", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps(older | {"torch_dtype": "bfloat16", "_name_or_path": "x/y"}))
    assert identity_of(tmp_path) == before


def test_rope_is_read_as_each_release_writes_it(tmp_path):
    save(tmp_path)
    newer = identity_of(tmp_path).rope
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    assert identity_of(tmp_path).rope == newer
    assert json.loads(newer)["rope_theta"] == 10_000


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda folder: edit(folder / "config.json", rms_norm_eps=0.5), {"config"}),
        (lambda folder: edit(folder / "config.json", rope_parameters={"rope_theta": 5.0}), {"config", "rope"}),
        (lambda folder: save(folder, tiny_model("llama", seed=1)), {"weights"}),
        (lambda folder: save(folder, tiny_model("llama", torch.bfloat16)), {"weights"}),
        (lambda folder: tiny_tokenizer(merges=2).save_pretrained(folder), {"tokenizer"}),
        (lambda folder: tiny_tokenizer("{{ messages[0]['content'] }}").save_pretrained(folder), {"chat_template"}),
    ],
)
def test_what_changes_the_model_changes_the_identity(change, fields, tmp_path):
    before = identity_of(save(tmp_path))
    change(tmp_path)
    after = identity_of(tmp_path)
    assert set(after.diff(before)) == fields
    assert after.identity != before.identity


def test_one_bit_of_the_weights_matters_and_other_files_do_not(tmp_path):
    save(tmp_path)
    before = identity_of(tmp_path)
    file = tmp_path / "model.safetensors"
    (tmp_path / "training_args.bin").write_bytes(b"x")
    save_file({"other": torch.ones(1)}, tmp_path / "optimizer.safetensors")
    assert identity_of(tmp_path) == before
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert set(identity_of(tmp_path).diff(before)) == {"weights"}


def test_the_digest_of_files_is_kept_until_one_changes(tmp_path, monkeypatch):
    folder, cache, read = save(tmp_path / "model"), tmp_path / "cache", []
    digest_range = identity._digest_range
    monkeypatch.setenv("KP_CACHE", str(cache))
    monkeypatch.setattr(identity, "_digest_range", lambda *part: read.append(part) or digest_range(*part))

    def digested():
        read.clear()
        return identity.digest_files(folder), bool(read)

    first = digested()
    assert first[1]
    assert digested() == first, "a file that was just written may change again at the same time"
    assert not cache.exists()
    monkeypatch.setattr(identity, "_SETTLED_S", 0)
    assert digested() == first
    assert digested() == (first[0], False)
    # Other bytes of the same size and modification time.
    weights = folder / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = digested()
    assert second[1]
    assert second[0] != first[0]
    # What is kept is damaged, or cannot be kept.
    for kept in cache.glob("digests/*"):
        kept.write_text("no digest")
    assert digested() == second
    assert digested() == (second[0], False)
    shutil.rmtree(cache)
    cache.write_text("a file")
    assert digested() == second


def test_weights_in_another_format_are_digested_whole(tmp_path):
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    found = []
    for scale in (1, 1, 2):
        torch.save({name: tensor * scale for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
        found.append(identity_of(tmp_path))
    assert found[0] == found[1]
    assert set(found[2].diff(found[0])) == {"weights"}
    assert load_engine(tmp_path, device="cpu").fingerprint.same_model(found[2])


def test_a_tokenizer_that_truncated_once_is_the_same_tokenizer():
    tokenizer = tiny_tokenizer()
    first = load_engine(tiny_model("llama"), tokenizer=tokenizer).fingerprint
    tokenizer(TEXT, truncation=True, max_length=3)
    assert '"max_length":3' in tokenizer.backend_tokenizer.to_str()
    assert load_engine(tiny_model("llama"), tokenizer=tokenizer).fingerprint == first


def test_the_digest_of_a_tokenizer_is_kept_and_each_has_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("KP_CACHE", str(tmp_path))
    tokenizer, template = tiny_tokenizer(), ChatTemplate(tiny_tokenizer())
    stable, serialised = identity._stable, []
    monkeypatch.setattr(identity, "_stable", lambda value: serialised.append(value) or stable(value))
    first = identity.tokenizer_identity(tokenizer, template)
    assert len(serialised) == 1
    assert identity.tokenizer_identity(tokenizer, template) == first
    assert len(serialised) == 1
    tokenizer.add_tokens(["zebra"])
    assert identity.tokenizer_identity(tokenizer, template)["tokenizer"] != first["tokenizer"]
    for kept in tmp_path.glob("digests/*"):
        kept.write_text("no digest")
    assert identity.tokenizer_identity(tiny_tokenizer(), template) == first


def test_damaged_checkpoints_are_named(tmp_path):
    file = save(tmp_path) / "model.safetensors"
    file.unlink()
    with pytest.raises(ModelError, match="holds none of model"):
        identity_of(tmp_path)
    save(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ModelError, match="ends before its tensors"):
        identity_of(tmp_path)
    with pytest.raises(ModelError, match="Could not load"):
        load_engine(tmp_path)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Cuts the model hub off, which would be asked again and again for half a minute, and gives it an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub" / "models--veyl--bell"


def test_a_gpu_gives_kv_what_the_weights_leave_and_a_cpu_a_quarter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (64_000, 80_000))
    assert default_cache_bytes(torch.device("cuda")) == 48_000
    assert default_cache_bytes(torch.device("cpu")) == memory_bytes(torch.device("cpu")) // 4


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Where the hub is: nobody listens there yet. A model `veyl/bell` is in its cache."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("kp_core.bundled.getproxies", dict)
    (tmp_path / "models--veyl--bell").mkdir()
    return port


@pytest.mark.parametrize("ask", [load_engine, identity_of, load_tokenizer, load_session])
def test_a_model_that_is_nowhere_is_said_in_one_line_and_nothing_is_tried_again(ask, hub, caplog, capfd):
    with pytest.raises(ModelError, match=r"no folder here.* cannot be reached\. Did you mean 'veyl/bell'\?") as caught:
        ask("veyl/bel")
    assert "\n" not in str(caught.value)
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_a_name_that_the_hub_is_asked_for_is_said_at_once(hub, monkeypatch, caplog):
    monkeypatch.setattr("kp_core.engines.hf.loading.AutoConfig.from_pretrained", lambda *_, **__: 1 / 0)
    with socket.create_server(("127.0.0.1", hub)), pytest.raises(ZeroDivisionError):
        load_engine("veyl/harbour")
    assert caplog.text.count("veyl/harbour is not on this machine") == 1


def test_an_id_is_the_same_model_as_its_files(offline):
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = save(offline / "snapshots" / commit, max_shard_size="20KB")
    (offline / "refs").mkdir()
    (offline / "refs" / "main").write_text(commit)
    by_id = load_engine("veyl/bell", device="cpu", dtype="float32").fingerprint
    assert by_id.identity == identity_of("veyl/bell").identity == identity_of(folder).identity


def test_files_that_change_between_loading_and_digesting_are_noticed(tmp_path):
    save(tmp_path)
    engine, early = (load_engine(tmp_path, device="cpu", dtype="float32") for _ in range(2))
    known = early.fingerprint
    (tmp_path / "trainer_state.json").write_text("{}")
    assert engine.fingerprint == known
    engine = load_engine(tmp_path, device="cpu", dtype="float32")
    save(tmp_path, tiny_model("llama", seed=1))
    with pytest.raises(ModelError, match="changed after they were loaded"):
        engine.build_pack(TEXT)
    assert early.fingerprint == known


# Adapters


def test_a_model_of_peft_answers_as_peft_does():
    adapted = with_lora()
    ids = torch.randint(250, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = adapted.eval()(input_ids=ids).logits[0, -1]
        with adapted.disable_adapter():
            plain = adapted(input_ids=ids).logits[0, -1]
    model = probed(load(adapted, tiny_tokenizer(), None, None)[0])
    found = model.forward(ids[0].tolist(), KVBuffer(model.shape, 16))[0]
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)


def test_adapters_are_part_of_the_identity():
    plain, adapted = engine_of(tiny_model("llama")).fingerprint, engine_of(with_lora()).fingerprint
    assert plain.adapters == "none"
    assert set(adapted.diff(plain)) == {"adapters"}
    assert engine_of(with_lora()).fingerprint == adapted
    injected = with_lora().get_base_model()
    assert engine_of(injected).fingerprint == adapted
    disabled, merged, saved = with_lora(), with_lora(), with_lora(modules_to_save=["lm_head"])
    disabled.base_model.disable_adapter_layers()
    merged.merge_adapter()
    differences = {
        "lora_alpha": (with_lora(alpha=9), {"adapters"}),
        "weights": (with_lora(seed=1), {"adapters"}),
        "disabled": (disabled, {"adapters"}),
        "merged": (merged, {"adapters", "weights"}),
        "modules_to_save": (saved, {"adapters"}),
    }
    found = {name: engine_of(model).fingerprint for name, (model, _) in differences.items()}
    assert {name: set(each.diff(adapted)) for name, each in found.items()} == {
        name: fields for name, (_, fields) in differences.items()
    }
    assert len({each.identity for each in found.values()}) == len(found)


def test_packs_of_another_adapter_are_refused():
    pack = engine_of(with_lora(alpha=8)).build_pack(TEXT)
    with pytest.raises(PackError, match="adapters: pack has"):
        engine_of(with_lora(alpha=16)).generate("Who?", packs=[pack])


def test_adapters_that_act_on_positions_are_refused():
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ModelError, match="acts on positions"):
        engine_of(get_peft_model(tiny_model("llama"), prompts))


def test_weights_larger_than_memory_are_refused_before_they_are_read(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with (tmp_path / "more.safetensors").open("wb") as sparse:
        sparse.truncate(2**42)
    with pytest.raises(ModelError, match=r"needs about 4,398\.\d GB in float32, and there are .* smaller model"):
        load(tmp_path, tiny_tokenizer(), "cpu", "float32")
    with pytest.raises(ModelError, match=r"needs about 2,199\.\d GB in bfloat16"):
        load(tmp_path, tiny_tokenizer(), "cpu", "bfloat16")


def test_a_folder_with_an_adapter_says_how_to_load_it(tmp_path):
    with_lora().save_pretrained(save(tmp_path))
    with pytest.raises(ModelError, match="put the adapter on it"):
        load_engine(tmp_path)


# Changes under a running engine


def add_one(tensor):
    with torch.no_grad():
        tensor.add_(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.set_adapter("second"),
        lambda model: model.delete_adapter("second"),
        lambda model: model.add_adapter("third", LoraConfig(target_modules=["q_proj"])),
        lambda model: model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj").scale_layer(2.0),
        lambda model: add_one(model.get_parameter("base_model.model.model.norm.weight")),
        lambda model: model.get_parameter("base_model.model.lm_head.weight").data.mul_(2),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.base_model.model, "lm_head", torch.nn.Linear(64, 268, bias=False)),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1).step(
            lambda: model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward() or 0.0
        ),
    ],
    ids=["disable", "merge", "select", "delete", "add", "scale", "write", "data", "to", "replace", "train"],
)
def test_a_model_that_changes_under_its_engine_is_refused(change):
    model = with_lora()
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    engine = engine_of(model)
    engine.generate(TEXT, max_tokens=1)
    change(model)
    for request in (lambda: engine.generate(TEXT, max_tokens=1), lambda: engine.build_pack(TEXT)):
        with pytest.raises(ModelError, match="make a new engine"):
            request()
    engine_of(model)


def test_a_fingerprint_is_taken_of_the_model_that_was_loaded_or_not_at_all():
    model = with_lora()
    engine = engine_of(model)
    model.merge_adapter()
    with pytest.raises(ModelError):
        _ = engine.fingerprint


def test_reading_the_model_and_undoing_a_change_do_no_harm():
    model = with_lora()
    engine = engine_of(model)
    before = engine.generate(TEXT, max_tokens=3)
    with model.disable_adapter():
        model.eval()(input_ids=torch.ones(1, 4, dtype=torch.long))
        with pytest.raises(ModelError, match="q_proj"):
            engine.generate(TEXT, max_tokens=3)
    model.train().requires_grad_(requires_grad=False)
    copy.deepcopy(model).to(torch.bfloat16)
    model.state_dict()
    assert engine.generate(TEXT, max_tokens=3).token_ids == before.token_ids


def test_models_made_in_inference_mode_are_watched_as_far_as_may_be():
    with torch.inference_mode():
        model = tiny_model("llama")
        check = watched(model)
        check()
        model.lm_head.weight.mul_(2)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        check()


# Code that comes with a model


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_model_runs_only_where_it_is_trusted(trusted, tmp_path, monkeypatch):
    folder, ran = save(tmp_path / "model"), tmp_path / "ran"
    edit(
        folder / "config.json",
        model_type="stranger",
        auto_map={"AutoConfig": "code.StrangerConfig", "AutoModelForCausalLM": "code.StrangerForCausalLM"},
    )
    (folder / "code.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class StrangerConfig(LlamaConfig):\n    model_type = 'stranger'\n"
        "class StrangerForCausalLM(LlamaForCausalLM):\n    config_class = StrangerConfig\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    if trusted:
        engine = load_engine(folder, device="cpu", trust_remote_code=True)
        assert engine.fingerprint.same_model(identity_of(folder, trust_remote_code=True))
    else:
        with pytest.raises(ModelError, match=r"Read that code.*`trust_remote_code=True`"):
            load_engine(folder)
        identity_of(folder)  # Needs the files of the model only.
    assert ran.exists() == trusted


def test_code_of_a_tokenizer_does_not_run(tmp_path, monkeypatch):
    folder, ran = save(tmp_path / "model"), tmp_path / "ran"
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="StrangerTokenizer",
        auto_map={"AutoTokenizer": ["code.StrangerTokenizer", None]},
    )
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass StrangerTokenizer: pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    for read in (load_engine, identity_of):
        with pytest.raises(ModelError, match="trust_remote_code=True"):
            read(folder)
    assert not ran.exists()


# Models that cannot be used


@pytest.fixture
def unloaded(monkeypatch):
    """A path to a model of which no weights may be loaded."""

    def refuse(*_, **__):
        raise AssertionError("weights were loaded before the setting was refused")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


@pytest.mark.parametrize("device", ["quantum", "meta", "cuda:99", 1.5])
def test_devices_that_are_not_there_are_refused_first(device, tmp_path, unloaded):
    for model in (save(tmp_path), tiny_model("llama")):
        with pytest.raises(ModelError, match="cannot be used here"):
            load_engine(model, tokenizer=tiny_tokenizer(), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_cuda_says_so(tmp_path, unloaded):
    with pytest.raises(ModelError, match=r"device='cuda', which cannot be used here.*This machine has: cpu"):
        load_engine(save(tmp_path), device="cuda")


def test_weights_on_disk_are_refused(tmp_path):
    save(tmp_path)
    layout = {"model.layers.0": "disk", "model.layers.1": "cpu", "model.embed_tokens": "cpu", "model.norm": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=layout | {"lm_head": "cpu", "model.rotary_emb": "cpu"}, offload_folder=tmp_path / "off"
    )
    with pytest.raises(ModelError, match="without `device_map`"):
        engine_of(model)
    with torch.device("meta"):
        absent = tiny_model("llama")
    with pytest.raises(ModelError, match="not in memory"):
        engine_of(absent)


def test_dynamic_quantisation_is_refused():
    with warnings.catch_warnings(action="ignore"):
        quantised = quantize_dynamic(tiny_model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ModelError, match=r"quantised by torch\.ao"):
        engine_of(quantised)


@pytest.mark.parametrize("model", [42, object(), torch.nn.Linear(2, 2), tiny_tokenizer(), ["a/b"]])
def test_what_is_no_model_is_named(model):
    with pytest.raises(ModelError, match=rf"type {type(model).__name__}; expected"):
        load_engine(model, tokenizer=tiny_tokenizer())


def test_models_without_logits_are_refused():
    with pytest.raises(ModelError, match="gives no logits"):
        engine_of(AutoModel.from_config(ARCHITECTURES["llama"]()))


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-of-that-name", "a b c", "../x/y/z", ""])
def test_an_id_that_cannot_be_reached_is_one_line(name, offline):
    for read in (load_engine, identity_of):
        with pytest.raises(
            ModelError, match=r"no such file or folder|no folder here|Expected a Hugging Face id"
        ) as caught:
            read(name)
        assert "\n" not in str(caught.value)


def test_what_the_tests_at_load_found_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "cache"))
    save(tmp_path / "model")
    load_engine(tmp_path / "model", dtype="float32")
    assert not (tmp_path / "cache" / "tested").exists(), "they took no seconds"
    monkeypatch.setattr(probe, "_KEPT_S", 0)
    first = load_engine(tmp_path / "model", dtype="float32")
    (result,) = (tmp_path / "cache" / "tested").iterdir()
    told = result.read_bytes()
    again = load_engine(tmp_path / "model", dtype="float32")
    assert (again.supports, again.lacks, again.fingerprint) == (first.supports, first.lacks, first.fingerprint)
    assert again.prefill("Which bird?").logits.equal(first.prefill("Which bird?").logits)
    # It is what is read, and what cannot be read is found again.
    result.write_bytes(json.dumps(json.loads(told) | {"batches": False, "lacks": {"batch": "it said so"}}).encode())
    assert load_engine(tmp_path / "model", dtype="float32").lacks["batch"] == "it said so"
    for damaged in (b"", told[:-9], b"[]", b'{"rows": [1], "attends": true, "batches": true, "lacks": {}}'):
        result.write_bytes(damaged)
        assert load_engine(tmp_path / "model", dtype="float32").lacks == first.lacks
        assert result.read_bytes() == told
    # Of another dtype, other shapes, and a model object, it says nothing.
    load_engine(tmp_path / "model", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    load_engine(model, tokenizer=tiny_tokenizer())
    assert len([*result.parent.iterdir()]) == 2


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_the_cache_is_passed_by_the_name_that_this_release_of_transformers_gives_it(name):
    class Model:
        forward = staticmethod(eval(f"lambda input_ids, {name}=None, use_cache=None: None"))  # noqa: S307

    assert cache_parameter(Model()) == name
