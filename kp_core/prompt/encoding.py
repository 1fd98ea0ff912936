"""One-pass tokenisation in which the template's special tokens are control tokens and everybody else's are text."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kp_core.errors import PromptError, UnsupportedModelError

__all__ = ["Encoded", "PromptEncoder", "insert"]


@dataclass(frozen=True)
class Encoded:
    """Token ids, and where each came from in the rendered prompt.

    `text` is what went through the tokenizer, and `offsets` count its characters: guards are not in it, and special
    tokens have other names. `runs` says where each stretch of equal text begins, as `(tokenised, rendered)`. Positions
    are mapped when they are asked for: there are thousands of tokens and a handful of questions.
    """

    ids: tuple[int, ...]
    offsets: Sequence[tuple[int, int]]
    text: str
    runs: Sequence[tuple[int, int]]

    def token_at(self, char: int) -> int:
        """Index of the first token that begins at or after the rendered character `char`."""
        return bisect.bisect_left(self.offsets, self._tokenised(char), key=lambda offset: offset[0])

    def token_until(self, char: int) -> int:
        """One past the last token that ends at or before the rendered character `char`."""
        return bisect.bisect_right(self.offsets, self._tokenised(char), key=lambda offset: offset[1])

    def text_of(self, first: int, last: int) -> str:
        """The characters of the tokens `first:last`."""
        return self.text[self.offsets[first][0] : self.offsets[last - 1][1]]

    def _tokenised(self, char: int) -> int:
        run = bisect.bisect_right(self.runs, char, key=lambda start: start[1]) - 1
        inside = self.runs[run][0] + char - self.runs[run][1]
        return inside if run + 1 == len(self.runs) else min(inside, self.runs[run + 1][0])


class PromptEncoder:
    """Encodes rendered prompts with a twin of the model's tokenizer.

    The twin knows each special token under a secret name instead of its own. `escape` puts a guard, which stands for
    nothing, into special-token strings in data; `encode` gives the remaining ones, which the template wrote, their
    secret names, and takes the guards out. The whole prompt then passes the unchanged pipeline once, and `<|im_end|>`
    inside a fact is as ordinary as any other text.
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
        renamed = [token for token in state["added_tokens"] if token["special"]]
        specials = [token["content"] for token in renamed]
        self._secret = {special: f"<|{nonce}.{number}|>" for number, special in enumerate(specials)}
        for token in renamed:
            token["content"] = self._secret[token["content"]]
        # Renamed tokens get new ids in the twin, so they must come after the tokens that keep theirs.
        state["added_tokens"].sort(key=lambda token: token["special"])
        self._twin = Tokenizer.from_str(json.dumps(state))
        self._original = {self._twin.token_to_id(token["content"]): token["id"] for token in renamed}
        used = set().union(*specials)
        # Its first character is in no special token, so that none can end inside a guard.
        foreign = next(char for char in map(chr, itertools.count(ord("0"))) if char.isalnum() and char not in used)
        self.guard = foreign + secrets.token_hex(8)
        # Longest first, as one special token may begin with another.
        alternatives = "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)"
        # A guard goes behind the first character, so one behind a whole special token means a token of one character.
        self._control = re.compile(f"{self.guard}|(?:{alternatives})(?!{self.guard})")
        rests: dict[str, list[str]] = defaultdict(list)
        for special in specials:
            rests[special[0]].append(re.escape(special[1:]))
        # Only the first character is consumed, as special tokens may overlap.
        begins = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        self._begin = re.compile("|".join(begins) or "(?!)")
        self._unfinished = {special[:stop] for special in specials for stop in range(1, len(special))}
        self._longest = max(map(len, specials), default=0)

    def guards(self, data: str) -> list[int]:
        """Where guards go in `data`, so that it makes no special token, neither alone nor with what a template adds."""
        found = [match.end() for match in self._begin.finditer(data)]
        kept = len(data.rstrip())
        if any(data[start:kept] in self._unfinished for start in range(max(kept - self._longest, 0), kept)):
            found.append(kept)
        return found

    def escape(self, data: str) -> str:
        """`data` with its guards, so that a template may carry it."""
        return insert(data, ((at, self.guard) for at in self.guards(data)))

    def unescape(self, text: str) -> str:
        """The inverse of `escape`, on a whole rendered prompt."""
        return text.replace(self.guard, "")

    def encode(self, rendered: str) -> Encoded:
        """Tokens of a rendered prompt; positions count characters of `rendered` as it is, guards included."""
        pieces: list[str] = []
        runs = [(0, 0)]
        done = length = 0
        for match in self._control.finditer(rendered):
            plain, replacement = rendered[done : match.start()], self._secret.get(match[0], "")
            pieces += [plain, replacement]
            length += len(plain)
            runs += [(length, match.start()), (length + len(replacement), match.end())]
            length += len(replacement)
            done = match.end()
        text = "".join((*pieces, rendered[done:]))
        try:
            encoding = self._twin.encode(text, add_special_tokens=False)
        except TypeError as error:  # What the tokenizer says of half a surrogate pair.
            raise PromptError("Got text that is not Unicode. Decode it with errors='replace'.") from error
        ids = tuple(self._original.get(token, token) for token in encoding.ids)
        return Encoded(ids, encoding.offsets, text, runs)


def insert(text: str, pieces: Iterable[tuple[int, str]]) -> str:
    """`text` with each `(position, piece)` in it; pieces of one position come in the order given."""
    parts, done = [], 0
    for at, piece in sorted(pieces, key=lambda item: item[0]):
        parts += [text[done:at], piece]
        done = at
    return "".join((*parts, text[done:]))
