"""One-pass tokenisation in which the template's special tokens are control tokens and everybody else's are text."""

from __future__ import annotations

import bisect
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kp_core.errors import UnsupportedModelError

__all__ = ["Encoded", "PromptEncoder"]


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each the characters `[start, stop)` of the text it came from."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def token_at(self, char: int) -> int:
        """Index of the first token that begins at or after `char`."""
        return bisect.bisect_left(self.starts, char)

    def token_until(self, char: int) -> int:
        """One past the last token that ends at or before `char`."""
        return bisect.bisect_right(self.stops, char)


class PromptEncoder:
    """Encodes rendered prompts with a twin of the model's tokenizer.

    The twin knows each special token under a secret name instead of its own. `escape` guards special-token strings in
    data; `encode` gives the remaining ones, which the template wrote, their secret names. The whole prompt then passes
    the unchanged pipeline once, and `<|im_end|>` inside a fact is as ordinary as any other text.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - any object of the transformers tokenizer family
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} has no `tokenizers` backend, so characters cannot be mapped to tokens. "
                "Load the fast tokenizer of this model."
            )
        from tokenizers import Tokenizer

        nonce = secrets.token_hex(8)
        state = json.loads(backend.to_str())
        # Padding and truncation would change ids; the post-processor adds BOS, which is the template's business,
        # and trims blanks off the offsets.
        state.update(truncation=None, padding=None, post_processor=None)
        self._specials: list[str] = []
        secret_names: list[str] = []
        original_ids: list[int] = []
        for token in state["added_tokens"]:
            if token["special"]:
                self._specials.append(token["content"])
                original_ids.append(token["id"])
                token["content"] = f"<|{nonce}.{len(secret_names)}|>"
                secret_names.append(token["content"])
        # Renamed tokens get new ids in the twin, so they must come after the tokens that keep theirs.
        state["added_tokens"].sort(key=lambda token: token["content"] in secret_names)
        self._twin = Tokenizer.from_str(json.dumps(state))
        self._original = {
            self._twin.token_to_id(name): original for name, original in zip(secret_names, original_ids, strict=True)
        }
        self._secret = dict(zip(self._specials, secret_names, strict=True))
        self._guard = f"<|{secrets.token_hex(8)}."
        # Longest first, as one special token may begin with another.
        alternatives = "|".join(re.escape(special) for special in sorted(self._specials, key=len, reverse=True))
        self._special = re.compile(alternatives or r"(?!)")
        self._guarded = re.compile(re.escape(self._guard) + r"(\d+)\|>")
        self._either = re.compile(f"({self._guarded.pattern})|({self._special.pattern})")

    def escape(self, data: str) -> str:
        """`data` with every special-token string guarded, so that a template may carry it."""
        return self._special.sub(lambda match: f"{self._guard}{self._specials.index(match[0])}|>", data)

    def unescape(self, text: str) -> str:
        """The inverse of `escape`, on a whole rendered prompt."""
        return self._guarded.sub(lambda match: self._specials[int(match[1])], text)

    def encode(self, rendered: str) -> Encoded:
        """Tokens of a rendered prompt; offsets count characters of `rendered` as it stands, guards included."""
        pieces: list[str] = []
        # Where runs of unchanged text begin, in what is encoded and in `rendered`.
        encoded_at, rendered_at = [0], [0]
        done = length = 0
        for match in self._either.finditer(rendered):
            plain = rendered[done : match.start()]
            replacement = self._specials[int(match[2])] if match[2] is not None else self._secret[match[0]]
            pieces += [plain, replacement]
            encoded_at += [length + len(plain), length + len(plain) + len(replacement)]
            rendered_at += [match.start(), match.end()]
            length = encoded_at[-1]
            done = match.end()
        pieces.append(rendered[done:])
        encoding = self._twin.encode("".join(pieces), add_special_tokens=False)
        ids = tuple(self._original.get(token, token) for token in encoding.ids)
        starts, stops = zip(*encoding.offsets, strict=True) if encoding.ids else ((), ())
        if len(encoded_at) == 1:
            return Encoded(ids, starts, stops)
        return Encoded(
            ids,
            tuple(_map_back(starts, encoded_at, rendered_at)),
            tuple(_map_back(stops, encoded_at, rendered_at)),
        )


def _map_back(positions: Sequence[int], encoded_at: Sequence[int], rendered_at: Sequence[int]) -> list[int]:
    """Positions in the encoded string as positions in the rendered one; both ascend, so one walk suffices."""
    mapped, run = [], 0
    last = len(encoded_at) - 1
    for position in positions:
        while run < last and encoded_at[run + 1] <= position:
            run += 1
        while run > 0 and encoded_at[run] > position:
            run -= 1
        inside = rendered_at[run] + position - encoded_at[run]
        mapped.append(inside if run == last else min(inside, rendered_at[run + 1]))
    return mapped
