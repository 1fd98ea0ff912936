"""Tokenises a prompt in one pass: special tokens of the template are control tokens, those in data are plain text."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kp_core.errors import ModelError, PromptError

_SIGN = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class Encoded:
    """Token ids, and their positions in the rendered prompt.

    `text` is the input of the tokenizer, and `offsets` count its characters: it has no guards, and other names for
    special tokens. `runs` lists where each run of common text begins, as `(tokenised, rendered)`.
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

    The twin knows each control token only under a secret name. `escape` puts a guard, a random string, into
    control-token strings in data. `encode` gives the remaining ones, which the template wrote, their secret names, and
    removes the guards. So `<|im_end|>` inside a fact is ordinary text.

    Control tokens are the special tokens, and those added tokens that occur in `written`, the template's own text
    (`<think>`, `<tool_call>`), other than words and blanks.
    """

    def __init__(self, tokenizer: Any, written: str = "") -> None:  # noqa: ANN401 - of the transformers tokenizer family
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise ModelError(
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
        self._twin, self._secret, self._original = _twin(state, [*specials, *marks])
        numbers = {token["content"]: token["id"] for token in state["added_tokens"]}
        if lost := [mark for mark in marks if not self._finds(self._secret[mark], numbers[mark])]:
            # The normaliser changes the text in which these are searched, so those of the template are not found
            # either.
            marks = [mark for mark in marks if mark not in lost]
            self._twin, self._secret, self._original = _twin(state, [*specials, *marks])
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
        self._guards_of_data, self._guards_of_model = _guards_for(names), _guards_for(specials)

    def guards(self, data: str, *, own: bool = False) -> list[int]:
        """Return where guards go in `data`, so that it gives no control token, alone or joined to template text.

        In the model's `own` text only special tokens are guarded, because `<think>` is real there.
        """
        return self._guards_of_model(data) if own else self._guards_of_data(data)

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
            plain, replacement = rendered[end : match.start()], self._secret.get(match[0], "")
            pieces += [plain, replacement]
            length += len(plain)
            runs += [(length, match.start()), (length + len(replacement), match.end())]
            length += len(replacement)
            end = match.end()
        text = "".join((*pieces, rendered[end:]))
        try:
            ids, offsets = self._encode(text)
        except TypeError as error:  # The tokenizer's error for half a surrogate pair.
            raise PromptError("Got text that is not Unicode. Decode it with errors='replace'.") from error
        return Encoded(ids, offsets, text, runs)

    def _encode(self, text: str) -> tuple[tuple[int, ...], Sequence[tuple[int, int]]]:
        """The ids of the tokens of `text`, which has secret names, and their characters."""
        encoding = self._twin.encode(text, add_special_tokens=False)
        return tuple(self._original.get(token, token) for token in encoding.ids), encoding.offsets

    def _finds(self, secret: str, number: int) -> bool:
        """Whether the twin finds the token `number` by its `secret` name wherever it stands."""
        return all(number in self._encode(form.format(secret))[0] for form in ("{}", "a{}a", "\n{}\n"))


def _twin(state: dict[str, Any], names: Sequence[str]) -> tuple[Any, dict[str, str], dict[int, int]]:
    """A tokenizer, given as JSON, in which the tokens `names` have secret names; these names; and its original ids."""
    from tokenizers import Tokenizer

    nonce = secrets.token_hex(8)
    secret = {name: f"<|{nonce}.{number}|>" for number, name in enumerate(names)}
    added_tokens = [
        {**token, "content": secret.get(token["content"], token["content"])} for token in state["added_tokens"]
    ]
    model = _without_names(state["model"], secret)
    twin: Any = Tokenizer.from_str(json.dumps({**state, "added_tokens": added_tokens, "model": model}))
    # The new tokenizer numbers added tokens anew, in their order.
    return twin, secret, {twin.token_to_id(token["content"]): token["id"] for token in added_tokens}


def _without_names(model: dict[str, Any], secret: Mapping[str, str]) -> dict[str, Any]:
    """Put the secret names into the vocabulary of a tokenizer's model, where some models look up plain text first."""
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
            pair
            for pair, (left, right) in pairs
            if left not in secret and right not in secret and left + right not in secret
        ]
    return renamed


def _guards_for(names: Sequence[str]) -> Callable[[str], list[int]]:
    """A function that returns where guards go in a text: where any of `names` begins, or may begin at its end."""
    rests: dict[str, list[str]] = defaultdict(list)
    for name in names:
        rests[name[0]].append(re.escape(name[1:]))
    # The pattern consumes only the first character, because matches may overlap. Templates may change case.
    begins = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    begin = re.compile("|".join(begins) or "(?!)", re.IGNORECASE)
    unfinished = {name[:stop].lower() for name in names for stop in range(1, len(name))}
    longest = max(map(len, names), default=0)

    def guards(data: str) -> list[int]:
        positions = [match.end() for match in begin.finditer(data)]
        length = len(data.rstrip())
        if any(data[start:length].lower() in unfinished for start in range(max(length - longest, 0), length)):
            positions.append(length)
        return positions

    return guards


def insert(text: str, pieces: Iterable[tuple[int, str]]) -> str:
    """Insert each `(position, piece)` into `text`; pieces at one position keep their order."""
    chunks, end = [], 0
    for at, piece in sorted(pieces, key=lambda item: item[0]):
        chunks += [text[end:at], piece]
        end = at
    return "".join((*chunks, text[end:]))
