"""From token ids to the text a caller sees, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kp_core.packs.handle import strip_handles

__all__ = ["AnswerText"]

# The end of a text that more text could turn into a handle, or into what may stand before one.
_MAYBE_HANDLE = re.compile(
    r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))k(?:p(?::[a-z0-9_-]{0,63}(?:/[a-z2-7]{0,21})?)?)?\Z|\\[nrt]?\Z"
)


class AnswerText:
    """Decodes an answer incrementally, ends it at a stop string, and leaves handles out.

    What might still become a stop string or a handle is held back until it is decided, so that the pieces of a stream
    join to exactly `text`. Special tokens are left out, but for those in `kept`, which read as the text given there.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], kept: Mapping[int, str] | None = None) -> None:  # noqa: ANN401
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop, self._kept = tuple(stop), dict(kept or {})
        self._raw = ""
        self._given = 0
        self.text = ""
        """What was given out so far."""
        self.stopped = False
        """Whether a stop string was met."""

    def push(self, token: int) -> str:
        """The text that became certain with `token`, possibly empty."""
        self._raw += self._kept.get(token) or self._stream.step(self._backend, token) or ""
        if self._stop:
            found = [at for at in (self._raw.find(stop, self._given) for stop in self._stop) if at >= 0]
            if found:
                self._raw, self.stopped = self._raw[: min(found)], True
                return self.flush()
        return self._give(len(self._raw) - self._held())

    def flush(self) -> str:
        """Everything held back; the answer is over."""
        return self._give(len(self._raw))

    def _held(self) -> int:
        tail = self._raw[self._given :]
        held = next((len(tail) - at for at in range(len(tail)) if self._may_stop(tail[at:])), 0)
        handle = _MAYBE_HANDLE.search(tail)
        return max(held, len(tail) - handle.start() if handle else 0)

    def _may_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)

    def _give(self, until: int) -> str:
        piece = strip_handles(self._raw[self._given : until])
        self._given = max(self._given, until)
        self.text += piece
        return piece
