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
    """Token ids, and where each came from in the rendered prompt.

    `offsets` count characters of what went through the tokenizer. There, guarded and special tokens have other names
    than in the rendered prompt; `runs` says where each stretch of equal text begins, as `(tokenised, rendered)`.
    Positions are mapped when they are asked for: there are thousands of tokens and a handful of questions.
    """

    ids: tuple[int, ...]
    offsets: Sequence[tuple[int, int]]
    runs: Sequence[tuple[int, int]]

    def token_at(self, char: int) -> int:
        """Index of the first token that begins at or after the rendered character `char`."""
        return bisect.bisect_left(self.offsets, self._tokenised(char), key=lambda offset: offset[0])

    def token_until(self, char: int) -> int:
        """One past the last token that ends at or before the rendered character `char`."""
        return bisect.bisect_right(self.offsets, self._tokenised(char), key=lambda offset: offset[1])

    def chars(self, first: int, last: int) -> tuple[int, int]:
        """The rendered characters of the tokens `first:last`."""
        return self._rendered(self.offsets[first][0]), self._rendered(self.offsets[last - 1][1])

    def _tokenised(self, char: int) -> int:
        run = bisect.bisect_right(self.runs, char, key=lambda start: start[1]) - 1
        inside = self.runs[run][0] + char - self.runs[run][1]
        return inside if run + 1 == len(self.runs) else min(inside, self.runs[run + 1][0])

    def _rendered(self, char: int) -> int:
        run = bisect.bisect_right(self.runs, char, key=lambda start: start[0]) - 1
        inside = self.runs[run][1] + char - self.runs[run][0]
        return inside if run + 1 == len(self.runs) else min(inside, self.runs[run + 1][1])


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
        """Tokens of a rendered prompt; positions count characters of `rendered` as it stands, guards included."""
        pieces: list[str] = []
        runs = [(0, 0)]
        done = length = 0
        for match in self._either.finditer(rendered):
            plain = rendered[done : match.start()]
            replacement = self._specials[int(match[2])] if match[2] is not None else self._secret[match[0]]
            pieces += [plain, replacement]
            length += len(plain)
            runs += [(length, match.start()), (length + len(replacement), match.end())]
            length += len(replacement)
            done = match.end()
        pieces.append(rendered[done:])
        encoding = self._twin.encode("".join(pieces), add_special_tokens=False)
        return Encoded(tuple(self._original.get(token, token) for token in encoding.ids), encoding.offsets, runs)
