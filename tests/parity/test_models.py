"""The causal language models of transformers: from packs as from text, as `generate`, or refused with the reason."""

import copy
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kp_core import PackStore, Session, load_engine
from kp_core.engines.hf.unloaded import rope_of
from kp_core.errors import UnsupportedRequestError
from kp_core.packs.handle import find_handles
from kp_core.steering import Steering
from tests.kits import NaiveComposer, tiny_tokenizer
from tests.parity.families import (
    NOT_RUN,
    ONE_BY_ONE,
    PAGE,
    QUICK,
    STAY,
    VARIANTS,
    WINDOW,
    config_of,
    families,
    kinds,
    model_of,
    page,
    served,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = 4
# Their layers take no other sizes.
_UNFORESEEN = {"dbrx", "diffllama"}


def letters(count, shift=0):
    return "".join(chr(97 + (at * at + at // 7 + shift) % 26) for at in range(count))


def ask(text):
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Family:
    """A tiny model as transformers runs it, and an engine over it; shared, so tests may not count on an empty cache."""

    kind: str
    model: PreTrainedModel
    engine: Session


@lru_cache(maxsize=24)
def family_of(kind, dtype=torch.float32):
    model = model_of(kind, dtype)
    # Chunks that are longer than the window, and shorter ones.
    chunk = WINDOW + 32 if dtype == torch.float32 else WINDOW - 16
    engine = load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=chunk, cache_bytes=20_000_000)
    return Family(kind, copy.deepcopy(model), engine)  # Some change their buffers as they run.


MATRIX = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in served()]


@pytest.fixture(scope="module", params=MATRIX)
def family(request):
    return family_of(request.param)


@pytest.fixture(scope="module", params=MATRIX)
def in_bfloat16(request):
    return family_of(request.param, torch.bfloat16)


def test_a_pack_is_the_text(family, tmp_path):
    """Bit for bit where the engine says so; else as near as rounding lets it. And what `generate` says."""
    _packs_are_texts(family.engine, PackStore(tmp_path), family.model)


def test_a_pack_is_the_text_in_bfloat16(in_bfloat16, tmp_path):
    """Here `generate` computes in another order."""
    _packs_are_texts(in_bfloat16.engine, PackStore(tmp_path))


def _packs_are_texts(engine, store, model=None):
    """Below, at and above the window, with packs that cross it, in a conversation of three turns."""
    frame = len(engine.prefill(ask("")).prompt)
    for tokens in (WINDOW - 20, WINDOW, WINDOW + 1, 2 * WINDOW + 40):
        fact = letters(tokens - frame - 4) + ".\n"
        handle = store.put(engine.build_pack(fact, namespace="matrix"))
        messages = ask(f"{handle}\nA?")
        for turn in range(3 if tokens > 2 * WINDOW else 1):
            if turn:
                messages += [{"role": "assistant", "content": letters(9, turn)}, *ask(letters(WINDOW // 2, turn) + "?")]
            _same(engine, store.view("matrix"), messages, model)


def _same(engine, view, messages, model):
    engine.clear_cache()
    text = [{**message, "content": _texts(message["content"], view)} for message in messages]
    cold = engine.prefill(text, reuse=False)
    assert cold.usage.reused_tokens == 0
    warm = engine.prefill(messages, view=view)
    assert cold.prompt.token_ids == warm.prompt.token_ids
    assert_alike(engine, cold.logits, warm.logits)
    assert warm.usage.reused_tokens >= warm.usage.pack_tokens > 0
    if model is None:
        return
    answer = engine.generate(messages, view=view, max_tokens=TOKENS)
    ids = torch.tensor([answer.prompt.token_ids])
    with torch.inference_mode():
        expected = model.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    torch.testing.assert_close(cold.logits, expected.logits[0][0], rtol=1e-3, atol=1e-3)
    assert answer.token_ids == tuple(expected.sequences[0, ids.shape[1] :].tolist())


def _texts(content, view):
    for *_, handle in find_handles(content):
        content = content.replace(str(handle), view.source.get(handle).text)
    return content


def assert_alike(engine, one, other):
    """The same bits where the engine supports that, else the same but for rounding."""
    if "bitwise" in engine.engine.supports:
        assert torch.equal(one, other)
        return
    rounding = 1e-4 if engine.fingerprint.dtype == "float32" else 0.1
    assert float((one - other).float().norm()) <= rounding * float(other.float().norm())


@pytest.mark.slow
@pytest.mark.parametrize("family", [kind for kind in served() if kinds()[kind].name == "plain"], indirect=True)
def test_keys_of_plain_models_are_moved_or_not_as_the_page_says(family, tmp_path):
    kind, model = family.kind, family.engine.engine.model
    rope = _told(attrgetter("rope"), model)
    assert (rope is not None) == (kind not in STAY and "compose" not in model.lacks)
    # A narrow model of its configuration turns keys as it does, or says that it cannot tell.
    config_of(kind).save_pretrained(tmp_path)
    foreseen = _told(rope_of, tmp_path)
    if rope is None or kind in _UNFORESEEN:
        assert foreseen is None
    else:
        assert (foreseen.layers, foreseen.interleaved) == (rope.layers, rope.interleaved)
        assert torch.equal(foreseen.frequencies, rope.frequencies)


def _told(how, it):
    try:
        return how(it)
    except UnsupportedRequestError:
        return None


def test_answers_are_decoded_together_or_not_as_the_page_says(family):
    model = family.engine.engine.model
    if kinds()[family.kind].name in ("plain", "windows"):
        assert ("batch" not in model.lacks) == (family.kind not in ONE_BY_ONE)


@pytest.mark.parametrize("family", QUICK, indirect=True)
def test_packs_built_together_are_packs_built_alone(family):
    engine = family.engine
    texts = [letters(WINDOW + 8, shift) for shift in range(16)]
    together = list(engine.build_packs(texts, progress=False))
    for text, pack in list(zip(texts, together, strict=True))[5::5]:
        alone = engine.build_pack(text).kv
        if "bitwise" in engine.engine.supports:
            assert pack.kv.equal(alone)
        for one, other in zip(pack.kv.keys + pack.kv.values, alone.keys + alone.values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


PAIRS = [("Be formal.", "be loose"), ("Dear Sir or Madam", "hey you")]


@pytest.mark.parametrize("kind", ["mistral", "gemma3n_text"])
def test_windows_and_shared_layers_are_steered_and_not_moved(kind, tmp_path):
    engine = family_of(kind).engine
    store = PackStore(tmp_path)
    one, other = (store.put(engine.build_pack(letters(70, at), namespace="m")) for at in (0, 3))
    steering = engine.make_steering(PAIRS, progress=False)
    options = {"view": store.view("m"), "steering": 4 * steering}
    plain = engine.prefill(ask(f"{one}\nA?"), view=store.view("m"))
    steered = engine.prefill(ask(f"{one}\nA?"), **options)
    assert_alike(engine, steered.logits, engine.prefill(ask(f"{one}\nA?"), **options, reuse=False).logits)
    assert not torch.equal(steered.logits, plain.logits)
    assert "compose" not in engine.engine.supports
    for composer in ("splice", NaiveComposer()):
        with pytest.raises(UnsupportedRequestError, match="window"):
            engine.generate(f"{one}\n\n{other}\nA?", view=store.view("m"), composer=composer)


def test_latents_are_neither_steered_nor_moved(tmp_path):
    engine = family_of("deepseek_v3").engine
    store = PackStore(tmp_path)
    one, other = (store.put(engine.build_pack(letters(70, at), namespace="m")) for at in (0, 3))
    with pytest.raises(UnsupportedRequestError, match="no values to alter"):
        engine.make_steering(PAIRS, progress=False)
    steering = Steering({0: torch.ones(1, 16)}, engine.fingerprint)
    with pytest.raises(UnsupportedRequestError, match="no values to alter"):
        engine.generate("A?", steering=steering)
    with pytest.raises(UnsupportedRequestError, match="latents"):
        engine.generate(f"{one}\n\n{other}\nA?", view=store.view("m"), composer="splice")


def test_every_causal_model_is_in_the_matrix_or_has_its_reason():
    """What is new in transformers is run; what is not run is named, and is still there."""
    named = [kind for kinds in NOT_RUN.values() for kind in kinds]
    assert len(named) == len(set(named))
    assert set(named) <= set(families())
    assert len(served()) >= 35
    assert set(ONE_BY_ONE) <= set(served())
    refused = {kind for kind, found in kinds().items() if isinstance(found, str) and found}
    assert {*served(), *refused, *named} - {*VARIANTS} == {*families()}
    assert {*families().values()} == {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}


def test_the_page_of_models_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.parity.families`"
