"""Reads the channels of GPT-OSS ("Harmony").

An answer is a sequence of messages, each `<|channel|>name ... <|message|>content<|end|>`. The channel `analysis` is
reasoning, a message with a recipient (`to=functions.name`) is a call, and all others are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kp_core.tools.base import Delta, ToolCallDelta, new_call_id
from kp_core.tools.formats import HARMONY
from kp_core.tools.reader import AnswerReader

__all__ = ["HarmonyReader"]

_END, _MESSAGE = "<|end|>", "<|message|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")


class HarmonyReader(AnswerReader):
    """As `AnswerReader`, for messages in channels; `tools` maps the callable tools to their parameters."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(HARMONY, tools, thought=("", _END))
        self._step = self._head

    def finish(self) -> list[Delta]:
        """See `AnswerReader.finish`."""
        if self._step == self._head and self._is_first and not self._buffer.lstrip().startswith("<"):
            self._step = self._text
        return super().finish()

    @property
    def _is_first(self) -> bool:
        return not (self.text or self.reasoning or self.calls)

    @property
    def _trigger(self) -> str:
        return _END

    def _begin(self) -> Iterator[Delta]:
        """A message header follows the arguments of a call, as after every message."""
        return self._head()

    def _after_thought(self) -> Iterator[Delta]:
        self._step = self._head
        yield from ()

    def _head(self) -> Iterator[Delta]:
        """Read up to the content of a message; an answer without a header is text."""
        lead = self._buffer.lstrip()
        if self._is_first and lead and not any(sign.startswith(lead) or lead.startswith(sign) for sign in _BEGINNINGS):
            self._step = self._text
            return
        head, separator, rest = self._buffer.partition(_MESSAGE)
        if not separator:
            return
        self._buffer = rest
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient is not None and recipient[1] in self._names:
            self._step, self._open_call = self._native, (new_call_id(), recipient[1], [])
            yield Delta(tool_call=ToolCallDelta(len(self.calls), self._open_call[0], recipient[1]))
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._step = self._reasoning
            yield from self._think("\n" if self.reasoning else "")
        else:
            self._step = self._text
            yield from self._say("\n\n" if self.text else "")
