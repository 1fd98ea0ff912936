"""Weights that are changed in place: noticed where that is cheap, and taken by `refresh` in any case."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from kp_core import PackStore, load_engine
from kp_core.engines.hf.model import CausalModel
from kp_core.errors import ModelError, PackError
from kp_methods.calibration import Calibration, CalibrationRow, calibrations_of
from tests.kits import tiny_model, tiny_tokenizer

TEXT = "The gate of the harbour is green and old, and nobody knows who painted it."


def engine_of(model):
    return load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=16, cache_bytes=10**7)


def change(model, *, silently):
    weight = model.model.layers[0].self_attn.k_proj.weight
    if silently:
        # Behind the bytes that are looked at, through `.data`.
        weight.data[0, :4] += 1
    else:
        with torch.no_grad():
            weight[0, :4] += 1


# In bfloat16 weights stand in another layout, beside the model's own.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silently", [False, True])
def test_after_a_refresh_everything_is_of_the_model_as_it_is(silently, dtype, tmp_path):
    model = tiny_model("llama", dtype)
    engine, store = engine_of(model), PackStore(tmp_path)
    handle = store.put(engine.build_pack(TEXT, namespace="a"))
    asked, before = f"{handle}\n\nWho?", engine.fingerprint
    engine.generate(asked, view=store.view("a"), max_tokens=4)
    change(model, silently=silently)
    if not silently:
        with pytest.raises(ModelError, match=r"session\.refresh\(\)"):
            engine.generate(asked, view=store.view("a"), max_tokens=4)
    engine.refresh()
    assert set(before.diff(engine.fingerprint)) == {"weights"}
    with pytest.raises(PackError):
        engine.generate(asked, view=store.view("a"), max_tokens=4)
    store.put(engine.build_pack(TEXT, namespace="a"))
    fresh = engine_of(model)
    assert fresh.fingerprint == engine.fingerprint
    answers = [each.generate(asked, view=store.view("a"), max_tokens=9) for each in (engine, fresh)]
    assert torch.equal(*(answer.logits for answer in answers))
    assert answers[0].token_ids == answers[1].token_ids
    # It is watched from there on.
    change(model, silently=False)
    with pytest.raises(ModelError):
        engine.generate("Hi", max_tokens=1)


def test_a_model_of_a_folder_is_refreshed_to_what_it_is_in_memory(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), dtype="float32", device="cpu")
    before = engine.fingerprint
    engine.refresh()
    assert engine.fingerprint == before


def test_nothing_is_refreshed_while_it_is_used():
    engine = engine_of(tiny_model("llama"))
    stream = engine.stream("Hi there", max_tokens=9)
    next(iter(stream))
    with pytest.raises(ModelError, match="under way"):
        engine.refresh()
    stream.close()
    engine.refresh()


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def with_adapters(dtype=torch.float32):
    torch.manual_seed(1)
    model = get_peft_model(tiny_model("llama", dtype), LORA, adapter_name="a")
    model.add_adapter("b", LORA)
    model.set_adapter("a")
    return model


def layer(model):
    return model.get_base_model().model.layers[0].self_attn


def unmerged(model):
    model.merge_adapter()
    yield
    model.unmerge_adapter()


def disabled(model):
    with model.disable_adapter():
        yield


def folded(model):
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "both", combination_type="linear")
    model.set_adapter("both")


def loaded_back(model, **how):
    other = copy.deepcopy(model).state_dict()
    model.load_state_dict({name: 1.25 * tensor for name, tensor in other.items()}, **how)


def parametrised(model):
    torch.nn.utils.parametrizations.weight_norm(model.get_base_model().model.layers[0].mlp.up_proj)


CHANGES = {
    "switched": lambda model: model.set_adapter("b"),
    "merged": lambda model: model.merge_adapter(),
    "merged, one of two": lambda model: model.merge_adapter(["b"]),
    "merged and unloaded": lambda model: model.merge_and_unload(),
    "unloaded": lambda model: model.unload(),
    "layers disabled": lambda model: model.base_model.disable_adapter_layers(),
    "deleted": lambda model: model.delete_adapter("a"),
    "added and taken": lambda model: (model.add_adapter("c", LORA), model.set_adapter("c")),
    "combined": folded,
    "scaled": lambda model: layer(model).q_proj.scale_layer(3.0),
    "adapter written": lambda model: layer(model).q_proj.lora_B["a"].weight.data.mul_(-2),
    "loaded": loaded_back,
    "loaded by assignment": lambda model: loaded_back(model, assign=True),
    "set to new data": lambda model: setattr(layer(model).k_proj.weight, "data", -layer(model).k_proj.weight.data),
    "another parameter": lambda model: setattr(
        layer(model).k_proj, "weight", torch.nn.Parameter(-layer(model).k_proj.weight)
    ),
    "another module": lambda model: setattr(layer(model), "o_proj", torch.nn.Linear(64, 64, bias=False)),
    "a buffer": lambda model: model.get_base_model().model.rotary_emb.inv_freq.mul_(0.5),
    "another buffer": lambda model: model.get_base_model().model.rotary_emb.register_buffer(
        "inv_freq", model.get_base_model().model.rotary_emb.inv_freq / 3, persistent=False
    ),
    "bias added": lambda model: layer(model).k_proj.register_parameter("bias", torch.nn.Parameter(torch.ones(32))),
    "more tokens": lambda model: model.get_base_model().resize_token_embeddings(300, mean_resizing=False),
    "another dtype": lambda model: model.to(torch.bfloat16),
    "norm": lambda model: model.get_base_model().model.norm.weight.data.mul_(3),
    "normed weight": parametrised,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_refused_until_it_is_refreshed_and_then_answers_as_a_new_engine(change, tmp_path):
    model = with_adapters()
    engine, view = engine_of(model), PackStore(tmp_path).view("a")
    before = engine.generate(TEXT, max_tokens=6)
    change(model)
    for request in (lambda: engine.generate(TEXT, max_tokens=6), lambda: engine.build_pack(TEXT)):
        with pytest.raises(ModelError, match=r"session\.refresh\(\)"):
            request()
    engine.refresh()
    fresh = engine_of(model.get_base_model())
    assert engine.fingerprint == fresh.fingerprint
    assert engine.engine.supports == fresh.engine.supports
    assert engine.bytes_per_token == fresh.bytes_per_token
    assert engine.engine.model.vocabulary == fresh.engine.model.vocabulary
    answers = [each.generate(TEXT, max_tokens=6) for each in (engine, fresh)]
    assert not torch.equal(answers[0].logits, before.logits)
    assert torch.equal(*(answer.logits for answer in answers))
    assert answers[0].token_ids == answers[1].token_ids
    packs = [each.build_pack(TEXT) for each in (engine, fresh)]
    assert packs[0].kv.equal(packs[1].kv)
    assert calibrations_of(engine.host).of(view) is None


# What comes back is as it was: bit for bit, or it is refused.
@pytest.mark.parametrize("there_and_back", [unmerged, disabled], ids=["merged", "disabled"])
def test_a_change_that_is_taken_back_is_not_answered_meanwhile(there_and_back):
    model = with_adapters()
    engine = engine_of(model)
    before = engine.generate(TEXT, max_tokens=6)
    steps = there_and_back(model)
    next(steps)
    with pytest.raises(ModelError):
        engine.generate(TEXT, max_tokens=6)
    next(steps, None)
    engine.refresh()
    assert engine.generate(TEXT, max_tokens=6).token_ids == before.token_ids


def test_what_was_planned_before_a_refresh_is_not_done_by_the_new_model(tmp_path, caplog):
    model = with_adapters()
    engine, store = engine_of(model), PackStore(tmp_path)
    view = store.view("a")
    handle = store.put(engine.build_pack(TEXT, namespace="a", compiled_for="system"))
    other = store.put(engine_of(with_adapters(torch.bfloat16)).build_pack(TEXT[:60], namespace="a"))
    stream = engine.stream(f"{handle}\n\nWho?", view=view, max_tokens=4)
    packs = engine.build_packs([TEXT, TEXT[:40]], progress=False)
    with engine._idle.request():  # Background work waits, as while somebody is answered.
        engine.prefill(f"{other}\n\nWho?", view=view, mismatch="rebuild")  # Its pack is compiled when there is time.
        model.set_adapter("b")
        engine.refresh()
    with pytest.raises(ModelError, match="refreshed after"):
        stream.result()
    assert [pack.fingerprint for pack in packs] == [engine.fingerprint] * 2
    engine.when_idle(lambda: None).result()
    assert "Background work failed: The engine was refreshed" in caplog.text


def test_calibrations_are_of_the_model_as_it_is(tmp_path):
    model = with_adapters()
    engine, view = engine_of(model), PackStore(tmp_path).view("a")
    row = CalibrationRow("splice", "one fact", 2, 4096, 400, 400, 0, 0, 0.2)
    first, known = engine.fingerprint.identity, calibrations_of(engine.host)
    known.keep(Calibration(first, (row,)), view)
    groups = [[20, 20]]
    assert calibrations_of(engine.host).choice(groups, view)[0].key == "splice"
    model.set_adapter("b")
    engine.refresh()
    composer, why = calibrations_of(engine.host).choice(groups, view)
    assert composer.key == "exact"
    assert "nothing was measured" in why
    # Measured again, they stand beside those of the earlier model.
    calibrations_of(engine.host).keep(Calibration(engine.fingerprint.identity, (row,)), view)
    model.set_adapter("a")
    engine.refresh()
    assert engine.fingerprint.identity == first
    assert calibrations_of(engine.host).of(view).model == first


def test_two_sessions_of_one_engine_go_by_the_model_as_it_is(tmp_path):
    model = with_adapters()
    one = engine_of(model)
    two, store = load_engine(one.engine), PackStore(tmp_path)
    handle = store.put(one.build_pack(TEXT, namespace="a"))
    two.generate(f"{handle}\n\nWho?", view=store.view("a"), max_tokens=1)
    model.set_adapter("b")
    one.refresh()
    with pytest.raises(PackError):
        two.generate(f"{handle}\n\nWho?", view=store.view("a"), max_tokens=1)


def test_a_model_that_cannot_be_refreshed_stays_refused(monkeypatch):
    model = with_adapters()
    engine = engine_of(model)
    model.set_adapter("b")
    with monkeypatch.context() as patch:
        patch.setattr(CausalModel, "__init__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.refresh()
    with pytest.raises(ModelError):
        engine.generate(TEXT, max_tokens=1)
    engine.refresh()
    assert engine.generate(TEXT, max_tokens=1).token_ids


def test_an_answer_outside_the_tree_is_under_way_too():
    engine = engine_of(tiny_model("llama"))
    stream = engine.stream("Hi there", max_tokens=9, reuse=False)
    next(iter(stream))
    with pytest.raises(ModelError, match="under way"):
        engine.refresh()
    stream.close()
    engine.refresh()
