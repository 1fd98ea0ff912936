"""Log-probabilities of answers: those of a plain forward pass of transformers."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from kp_core import PackStore, Session, bundled_model
from kp_core.errors import OptionError, UnsupportedRequestError
from kp_core.tools.base import scored_token, token_bytes
from tests.conftest import roomy_engine, tiny_engine
from tests.kits import tiny_model, tiny_tokenizer
from tests.parity.test_seams import FixedEngine

FACT = "The mill of Veyl has four sails."
ASKED = [{"role": "user", "content": f"{FACT}\n\nHow many sails?"}]
SCHEMA = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}


def pairs(logprobs):
    return [(token.token_id, token.logprob) for token in logprobs]


def plain_pass(network, generation):
    """Log-softmax of the logits of transformers over prompt and answer, a row per token of the answer."""
    ids = [*generation.prompt.token_ids, *generation.token_ids]
    with torch.inference_mode():
        logits = network(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(dim=-1)[len(generation.prompt.token_ids) - 1 : -1]


def held_to(network, generation, top):
    rows = plain_pass(network, generation)
    assert len(generation.logprobs) == len(generation.token_ids) > 1
    for token, chosen, row in zip(generation.logprobs, generation.token_ids, rows, strict=True):
        assert token.token_id == chosen
        assert token.logprob == pytest.approx(float(row[chosen]), abs=1e-4)
        assert [other.logprob for other in token.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        best = [float(row[other.token_id]) for other in token.top]
        assert best == pytest.approx([other.logprob for other in token.top], abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.7, "seed": 3, "top_k": 40, "repetition_penalty": 1.3}])
def test_they_are_those_of_a_plain_forward_pass(architecture, options):
    generation = tiny_engine(architecture).generate(ASKED, max_tokens=12, top_logprobs=3, **options)
    held_to(tiny_model(architecture), generation, 3)


@pytest.mark.slow
def test_they_are_those_of_a_plain_forward_pass_of_the_bundled_model(smol):
    network = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    held_to(network, smol.generate(ASKED, max_tokens=16, top_logprobs=5), 5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param("bundled", marks=pytest.mark.slow)], ids=str
)
def test_a_pack_a_batch_and_a_second_call_give_the_bits_of_text(dtype, request, tmp_path):
    chat_engine = request.getfixturevalue("smol_here") if dtype == "bundled" else tiny_engine("llama", dtype)
    store = PackStore(tmp_path)
    handle = store.put(chat_engine.build_pack(FACT))
    with_handle = [{"role": "user", "content": f"{handle}\n\nHow many sails?"}]
    asked = {"text": ASKED, "pack": with_handle, "again": with_handle, "other": "Hello."}
    options = {"max_tokens": 10, "top_logprobs": 4, "view": store.view("default")}
    alone = chat_engine.generate(ASKED, reuse=False, **options)
    answers = dict(chat_engine.generate_many(asked, progress=False, **options))
    answers["pack alone"] = chat_engine.generate(with_handle, **options)
    assert answers["pack"].usage.pack_tokens > 0
    del answers["other"]
    is_bitwise = "bitwise" in chat_engine.engine.supports
    for name, answer in answers.items():
        assert answer.token_ids == alone.token_ids, name
        assert answer.logprobs == alone.logprobs or not is_bitwise, name


def test_they_come_before_grammar_and_temperature():
    engine = roomy_engine()
    held = engine.generate(ASKED, max_tokens=40, response_schema=SCHEMA, logprobs=True)
    held_to(tiny_model("llama"), held, 0)
    assert held.text.replace(" ", "") == '{"n":7}'


def test_without_being_asked_for_there_are_none():
    engine = tiny_engine()
    generation = engine.generate(ASKED, max_tokens=3)
    assert generation.logprobs is None
    assert all(delta.logprobs == () for delta in engine.stream(ASKED, max_tokens=3).deltas())
    given = engine.generate(ASKED, max_tokens=3, logprobs=True)
    assert given.token_ids == generation.token_ids
    assert [token.top for token in given.logprobs] == [(), (), ()]


def test_a_stream_gives_each_once_and_in_order():
    engine = roomy_engine()
    whole = engine.generate(ASKED, max_tokens=20, logprobs=True)
    stop = whole.text[4:7]
    for options in ({}, {"stop": stop}, {"response_schema": SCHEMA, "max_tokens": 40}):
        stream = engine.stream(ASKED, **{"max_tokens": 20, "logprobs": True, **options})
        parts = [token for delta in stream.deltas() for token in delta.logprobs]
        generation = stream.result()
        assert tuple(parts) == generation.logprobs
        assert [token.token_id for token in parts] == list(generation.token_ids)
    cancelled = threading.Event()
    cancelled.set()
    assert engine.generate(ASKED, cancel=cancelled, logprobs=True).logprobs == ()


def test_a_stream_that_is_closed_early_lets_go(tmp_path):
    engine = tiny_engine()
    stream = engine.stream(ASKED, max_tokens=50, logprobs=True)
    next(stream.deltas())
    stream.close()
    with pytest.raises(RuntimeError):
        stream.result()
    engine.clear_cache()
    assert engine.cached_bytes == 0


def test_bytes_of_tokens_join_to_their_text():
    for tokenizer in (tiny_tokenizer(merges=7), roomy_engine().tokenizer):
        bytes_of = token_bytes(tokenizer)
        text = "Ein Fähnlein, 日本 und 🙂.\n\n\tthe end"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(bytes_of, ids)).decode() == text
        assert bytes_of(tokenizer.convert_tokens_to_ids("<|im_end|>")) == b"<|im_end|>"
        assert bytes_of(10**6) == b""
    emoji = scored_token([(ids[0], -1.0), (ids[1], -2.0)], token_bytes(tiny_tokenizer()))
    assert emoji.to_dict()["top_logprobs"] == [{"token": "i", "bytes": [105], "logprob": -2.0}]


def test_bytes_of_tokens_that_are_written_as_text():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<0xE2>": 1, "▁the": 2, "fer": 3, "ry": 4}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_of = token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [bytes_of(token) for token in range(5)] == [b"<unk>", b"\xe2", b" the", b"fer", b"ry"]
    assert scored_token([(1, -0.5)], bytes_of).text == "�"


@pytest.mark.parametrize(
    "options",
    [{"logprobs": 5}, {"logprobs": "yes"}, {"top_logprobs": -1}, {"top_logprobs": 21}, {"top_logprobs": True}],
)
def test_bad_values_are_refused(options):
    with pytest.raises(OptionError, match=rf"Got {next(iter(options))}="):
        tiny_engine().generate("Hi", **options)


def test_more_than_the_vocabulary_are_all_there_is():
    engine = tiny_engine()
    [token] = engine.generate("Hi", max_tokens=1, top_logprobs=20).logprobs
    assert [other.logprob for other in token.top] == sorted((other.logprob for other in token.top), reverse=True)
    assert len({other.token_id for other in token.top}) == 20


def test_an_engine_without_them_refuses():
    with pytest.raises(UnsupportedRequestError, match="log-probabilities"):
        Session(FixedEngine()).generate("Hi", logprobs=True)


def test_several_answers_are_refused_with_what_to_do():
    with pytest.raises(OptionError, match=r"no option 'n'\. A call gives one answer: .* `seed`"):
        tiny_engine().generate("Hi", n=3)
    same = [tiny_engine().generate("Hi", temperature=1.0, seed=seed, max_tokens=12).token_ids for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]
