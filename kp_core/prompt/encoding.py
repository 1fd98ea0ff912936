"""Tokenises a prompt in one pass: special tokens of the template are control tokens, those in data are plain text."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kp_core.errors import PromptError, UnsupportedModelError

__all__ = ["Encoded", "PromptEncoder", "insert"]

_SIGN = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class Encoded:
    """Token ids, and their positions in the rendered prompt.

    `text` is the input of the tokenizer, and `offsets` count its characters: it has no guards, and other names for
    special tokens. `runs` lists where each stretch of common text begins, as `(tokenised, rendered)`. Positions are
    mapped on demand, because there are thousands of tokens and few queries.
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


class _Twin:
    """A tokenizer, given as JSON, in which the tokens `names` have secret names; `ids` returns the original ids."""

    def __init__(self, state: dict[str, Any], names: Sequence[str]) -> None:
        from tokenizers import Tokenizer

        nonce = secrets.token_hex(8)
        self.secret = {name: f"<|{nonce}.{number}|>" for number, name in enumerate(names)}
        added_tokens = [dict(token) for token in state["added_tokens"]]
        self._ids = {token["content"]: token["id"] for token in added_tokens}
        for token in added_tokens:
            token["content"] = self.secret.get(token["content"], token["content"])
        model = _without_names(state["model"], self.secret)
        self.tokenizer = Tokenizer.from_str(json.dumps({**state, "added_tokens": added_tokens, "model": model}))
        # The new tokenizer numbers added tokens anew, in their order.
        self._original = {self.tokenizer.token_to_id(self.secret.get(name, name)): at for name, at in self._ids.items()}

    def ids(self, encoding: Any) -> tuple[int, ...]:  # noqa: ANN401 - a tokenizers.Encoding
        return tuple(self._original.get(token, token) for token in encoding.ids)

    def finds(self, name: str) -> bool:
        """Whether the tokenizer finds the secret name of `name` wherever it stands."""
        texts = [form.format(self.secret[name]) for form in ("{}", "a{}a", "\n{}\n")]
        return all(self._ids[name] in self.ids(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def _without_names(model: dict[str, Any], secret: Mapping[str, str]) -> dict[str, Any]:
    """Put the secret names into the vocabulary of a tokenizer's model, so that plain text cannot give these tokens.

    Unigram needs this, and so do models that look up whole words before they split them.
    """
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        return {**model, "vocab": [[secret.get(piece, piece), score] for piece, score in vocab]}
    if not isinstance(vocab, dict) or secret.keys().isdisjoint(vocab):
        return model
    renamed = {**model, "vocab": {secret.get(piece, piece): number for piece, number in vocab.items()}}
    if model.get("unk_token") in secret:
        renamed["unk_token"] = secret[model["unk_token"]]
    if "merges" in model:
        pairs = ((pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])
        renamed["merges"] = [
            pair for pair, (left, right) in pairs if secret.keys().isdisjoint((left, right, left + right))
        ]
    return renamed


class _Begun:
    """Finds where any of some strings begins in a text, or may begin at its end."""

    def __init__(self, names: Sequence[str]) -> None:
        rests: dict[str, list[str]] = defaultdict(list)
        for name in names:
            rests[name[0]].append(re.escape(name[1:]))
        # The pattern consumes only the first character, because matches may overlap. Templates may change case.
        begins = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        self._begin = re.compile("|".join(begins) or "(?!)", re.IGNORECASE)
        self._unfinished = {name[:stop].lower() for name in names for stop in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def guards(self, data: str) -> list[int]:
        positions = [match.end() for match in self._begin.finditer(data)]
        length = len(data.rstrip())
        if any(
            data[start:length].lower() in self._unfinished for start in range(max(length - self._longest, 0), length)
        ):
            positions.append(length)
        return positions


class PromptEncoder:
    """Encodes rendered prompts with a twin of the model's tokenizer.

    The twin knows each control token only under a secret name, also in its model's vocabulary. `escape` puts a guard, a
    random string, into control-token strings in data. `encode` gives the remaining ones, which the template wrote,
    their secret names, and removes the guards. Then the unchanged tokenizer processes the whole prompt once, and
    `<|im_end|>` inside a fact is ordinary text.

    Control tokens are the special tokens, and those added tokens that occur in `written`, the template's own text
    (`<think>`, `<tool_call>`). Added words and blanks are not, because it does not matter who wrote them.
    """

    def __init__(self, tokenizer: Any, written: str = "") -> None:  # noqa: ANN401 - of the transformers tokenizer family
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} has no `tokenizers` backend, so characters cannot be mapped to tokens. "
                "Load the fast tokenizer of this model."
            )
        state = json.loads(backend.to_str())
        # Padding and truncation would change ids. The post-processor adds BOS, which is the template's task, and trims
        # blanks off the offsets.
        state.update(truncation=None, padding=None, post_processor=None)
        added = {token["content"]: token["special"] for token in state["added_tokens"]}
        specials = [name for name, special in added.items() if special]
        marks = [name for name, special in added.items() if not special and _SIGN.search(name) and name in written]
        self._twin = _Twin(state, [*specials, *marks])
        if lost := [mark for mark in marks if not self._twin.finds(mark)]:
            # The normaliser changes the text in which these are searched, so those of the template are not found
            # either.
            marks = [mark for mark in marks if mark not in lost]
            self._twin = _Twin(state, [*specials, *marks])
        names = [*specials, *marks]
        used = set().union(*names)
        # No control token contains the guard's first character, so none can end inside a guard.
        foreign = next(char for char in map(chr, itertools.count(ord("0"))) if char.isalnum() and char not in used)
        self.guard, self.other_guard = foreign + secrets.token_hex(8), foreign + secrets.token_hex(12).upper()
        # Longest first, because one control token may begin with another.
        alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        # A guard stands behind the first character. So a guard behind a whole control token means a token of one
        # character.
        self._control = re.compile(f"{self.guard}|(?:{alternatives})(?!{self.guard})")
        self._of_data, self._of_model = _Begun(names), _Begun(specials)

    def guards(self, data: str, *, own: bool = False) -> list[int]:
        """Return where guards go in `data`, so that it gives no control token, alone or joined to template text.

        In the model's `own` text only special tokens are guarded, because `<think>` is real there.
        """
        return (self._of_model if own else self._of_data).guards(data)

    def escape(self, data: str) -> str:
        """Return `data` with guards, ready for a template."""
        return insert(data, ((at, self.guard) for at in self.guards(data)))

    def unescape(self, text: str) -> str:
        """Remove the guards from a whole rendered prompt."""
        return text.replace(self.guard, "")

    def encode(self, rendered: str) -> Encoded:
        """Tokenise a rendered prompt; positions count characters of `rendered` with its guards."""
        pieces: list[str] = []
        runs = [(0, 0)]
        end = length = 0
        for match in self._control.finditer(rendered):
            plain, replacement = rendered[end : match.start()], self._twin.secret.get(match[0], "")
            pieces += [plain, replacement]
            length += len(plain)
            runs += [(length, match.start()), (length + len(replacement), match.end())]
            length += len(replacement)
            end = match.end()
        text = "".join((*pieces, rendered[end:]))
        try:
            encoding = self._twin.tokenizer.encode(text, add_special_tokens=False)
        except TypeError as error:  # The tokenizer's error for half a surrogate pair.
            raise PromptError("Got text that is not Unicode. Decode it with errors='replace'.") from error
        ids = self._twin.ids(encoding)
        return Encoded(ids, encoding.offsets, text, runs)


def insert(text: str, pieces: Iterable[tuple[int, str]]) -> str:
    """Insert each `(position, piece)` into `text`; pieces at one position keep their order."""
    chunks, end = [], 0
    for at, piece in sorted(pieces, key=lambda item: item[0]):
        chunks += [text[end:at], piece]
        end = at
    return "".join((*chunks, text[end:]))
