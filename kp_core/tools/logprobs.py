"""Log-probabilities of the tokens of an answer, in the form of OpenAI."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Scores: TypeAlias = Sequence[tuple[int, float]]
"""The log-probability of a token of an answer, and of the likeliest tokens in its place, each as (id, logprob)."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte, in tokenizers that write other tokens as text."""
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The byte behind each sign in tokenizers that write bytes as GPT-2 does."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability, before temperature, penalties and grammar."""

    token_id: int
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in its place, best first: as many as `top_logprobs` says."""

    @property
    def text(self) -> str:
        """Text of the token; a part of a character is `U+FFFD`, and `bytes` has it whole."""
        return self.bytes.decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's form: `token`, `bytes`, `logprob` and `top_logprobs`, a list of the same without the last."""
        return _plain(self) | {"top_logprobs": [_plain(token) for token in self.top]}


def _plain(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:  # noqa: ANN401 - see `Engine.tokenizer`
    """A function that returns the bytes of a token, none for an id without one.

    Those of all tokens of an answer join to its text.
    """
    backend, added = tokenizer.backend_tokenizer, frozenset(tokenizer.added_tokens_decoder)
    is_byte_level = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()

    def bytes_of(token: int) -> bytes:
        written = backend.id_to_token(token) or ""
        if token in added:
            return written.encode()
        if is_byte_level:
            return bytes(_BYTE_LEVEL[sign] for sign in written)
        if match := BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(match[1])
        return written.replace("▁", " ").encode()

    return bytes_of


def scored_token(scores: Scores, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """The first of `scores`, with the others as `top`."""
    (token, logprob), *others = scores
    top = tuple(TokenLogprob(other, bytes_of(other), value) for other, value in others)
    return TokenLogprob(token, bytes_of(token), logprob, top)
