"""Log-probabilities of the tokens of an answer, in the form of OpenAI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

__all__ = ["Scores", "TokenLogprob", "TokenNames"]

Scores: TypeAlias = Sequence[tuple[int, float]]
"""The log-probability of a token of an answer, and of the likeliest tokens in its place, each as (id, logprob)."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


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


class TokenNames:
    """Names tokens by their bytes: those of all tokens of an answer join to its text."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - see `Engine.tokenizer`
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer

    def named(self, scores: Scores) -> TokenLogprob:
        """The first of `scores`, with the others as `top`."""
        (token, logprob), *others = scores
        top = tuple(TokenLogprob(other, self.bytes(other), value) for other, value in others)
        return TokenLogprob(token, self.bytes(token), logprob, top)

    def bytes(self, token: int) -> bytes:
        """The bytes of a token: none for an id without a token."""
        written = self._backend.id_to_token(token) or ""
        if token in self._added:
            return written.encode()
        if self._byte_level:
            return bytes(self._byte_level[sign] for sign in written)
        if match := _BYTE.fullmatch(written):
            return bytes.fromhex(match[1])
        return written.replace("▁", " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _byte_level(self) -> dict[str, int]:
        """The byte behind each sign, as GPT-2 writes bytes; empty for tokenizers that write text."""
        if self._backend.decoder is None or b'"ByteLevel"' not in self._backend.decoder.__getstate__():
            return {}
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in plain]
        return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
