"""Tokens of every kind of tokenizer, decoded one by one: the pieces join to the decoding of all of them."""

import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import kp_core as kp
from kp_core.session.reading import StreamDecoder
from tests.core.prompt.families import FAMILIES
from tests.kits import CHATML, tiny_tokenizer

TEXTS = (
    "Ein Fähnlein, 日本 und 🙂👩‍🚀.\n\n\tthe end ",
    "  two  blanks, then a half � sign and 'quotes' don't .",
    "ไม่มีช่องว่าง नमस्ते \u200b\ufeff é e\u0301 🇩🇪",
    "",
)
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = ["▁", "▁the", "a", "b", "é", "▁▁▁▁", "日", "<0xE2", "�", "\n", "🙂", "▁t", "he"]
_SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_LLAMA = [*_SENTENCEPIECE, decoders.Strip(" ", 1, 0)]


def _special(backend):
    backend.add_special_tokens([BEGIN, END])
    backend.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    return backend


def _bytes_with(decoder, *, pieces=_PIECES, prepend=True):
    """SentencePiece's BPE, as in Llama 2 and Gemma: text that is not in the vocabulary is bytes."""
    vocabulary = {token: number for number, token in enumerate([UNKNOWN, *_BYTES, *pieces])}
    merges = [("t", "he")] if {"t", "he"} <= vocabulary.keys() else []
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=UNKNOWN))
    blanks = [normalizers.Prepend("▁")] * prepend
    backend.normalizer = normalizers.Sequence([*blanks, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(decoder)
    return _special(backend)


def _unigram():
    pieces = [(UNKNOWN, 0.0), *((byte, -9.0) for byte in _BYTES), *((piece, -2.0) for piece in _PIECES)]
    backend = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _special(backend)


def _metaspace():
    backend = Tokenizer(models.Unigram([(UNKNOWN, 0.0), *((piece, -2.0) for piece in _PIECES)], 0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _special(backend)


def _wordpiece():
    words = [UNKNOWN, "the", "end", "a", "##a", "##b", "##é", "don", "'", "t", ".", ",", "日", "##本", "🙂", "two"]
    backend = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return _special(backend)


def _words():
    backend = Tokenizer(models.WordLevel({UNKNOWN: 0, "the": 1, "end": 2, "a": 3}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _special(backend)


def _suffixes():
    """The first GPT's: the last token of a word carries `</w>`."""
    vocabulary = {
        token: number for number, token in enumerate([UNKNOWN, "a", "b", "the</w>", "a</w>", ".</w>", "é</w>"])
    }
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN, end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    return _special(backend)


TOKENIZERS = {
    "bpe with bytes": lambda: _bytes_with(_SENTENCEPIECE, prepend=False),
    "llama 2": lambda: _bytes_with(_LLAMA),
    "bytes and nothing else": lambda: _bytes_with(_SENTENCEPIECE, pieces=()),
    "unigram with bytes": _unigram,
    "unigram": _metaspace,
    "wordpiece": _wordpiece,
    "words": _words,
    "suffixes": _suffixes,
    "byte level": lambda: tiny_tokenizer().backend_tokenizer,
    "byte level with merges": lambda: tiny_tokenizer(merges=7).backend_tokenizer,
    **{
        f"family {name}": lambda family=family: family.tokenizer().backend_tokenizer
        for name, family in FAMILIES.items()
    },
}


def pieces_of(backend, ids):
    decoder = StreamDecoder(backend)
    return [*map(decoder.push, ids), decoder.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_whole_at_every_length(name):
    backend = TOKENIZERS[name]()
    draw, size = random.Random(7), backend.get_vocab_size()
    for text in TEXTS:
        ids = backend.encode(text).ids
        for stop in range(len(ids) + 1):
            assert "".join(pieces_of(backend, ids[:stop])) == backend.decode(ids[:stop])
    for _ in range(100):
        ids = [draw.randrange(size + 2) for _ in range(draw.randrange(40))]  # Two ids have no token.
        assert "".join(pieces_of(backend, ids)) == backend.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_piece_is_held_back_only_while_it_may_change(name):
    backend = TOKENIZERS[name]()
    for text in TEXTS:
        ids = backend.encode(text).ids
        pieces = pieces_of(backend, ids)
        for at, token in enumerate(ids, 1):
            whole, alone = backend.decode(ids[:at]), backend.decode([token])
            if alone and not whole.endswith("�") and backend.id_to_token(token) not in _BYTES:
                assert "".join(pieces[:at]) == whole


def test_a_mark_ends_what_is_held_back():
    backend = TOKENIZERS["llama 2"]()
    half = ["▁the", "<0xE2>", "<0x82>", "</s>", "<0xAC>", "▁the", "</s>", "▁the"]
    decoder = StreamDecoder(backend, {backend.token_to_id("</s>"): "[CALL]"})
    pieces = [*map(decoder.push, map(backend.token_to_id, half)), decoder.flush()]
    assert (
        "".join(pieces)
        == "the\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[CALL]\N{REPLACEMENT CHARACTER} the[CALL] the"
    )


@pytest.mark.parametrize("name", ["bpe with bytes", "llama 2", "bytes and nothing else", "unigram with bytes"])
def test_answers_of_models_with_bytes_as_tokens(name):
    backend = TOKENIZERS[name]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END, chat_template=CHATML)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3,
    )  # fmt: skip
    engine = kp.load_engine(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer)
    for seed in range(9):
        stream = engine.stream("a", max_tokens=40, temperature=2.0, seed=seed, logprobs=True)
        pieces = [*stream]
        answer = stream.result()
        said = answer.token_ids[: -1 if answer.finish_reason == "stop" else None]
        assert "".join(pieces) == answer.text == tokenizer.decode(said, skip_special_tokens=True)
        assert len(answer.logprobs) == len(answer.token_ids)
