"""Splits the text of an answer into visible text, reasoning and tool calls, piece by piece.

The parser of transformers (`tokenizer.get_response_parser`) raises for a call that the token limit cut off and for a
string that holds the mark at the end of calls, and needs a second description of each format.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from kp_core.bundled import needing
from kp_core.tools.base import Delta, JsonScan, ToolCall, ToolCallDelta
from kp_core.tools.formats import HARMONY, THINK, Thought, ToolFormat

_ID_ALPHABET = string.ascii_lowercase + string.digits


class AnswerReader:
    """Reads an answer while it is written.

    `form` is the format of calls, or `None` without tools: then markup is text. `tools` maps the callable tools to
    their parameters. `thought` marks reasoning; `opened` means that the prompt ends inside a `<think>` block. An
    answer that is nothing but calls in JSON, without the marks of `form`, is read as up to `untagged` calls. The reader
    holds back text that may still become markup or calls, so it never has to revoke a piece.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        *,
        thought: Thought | None = None,
        opened: bool = False,
        untagged: int = 0,
    ) -> None:
        self._form, self._tools = form, tools
        self._buffer = ""
        self._most_untagged = untagged
        self._held = "" if untagged else None  # Text that may still be calls; `None` once it cannot.
        self._thinks = thought is not None or opened
        self._open, self._close = thought or THINK
        self._step: Callable[[], Iterator[Delta]] = self._reasoning if opened else self._begin
        self._scan = JsonScan()
        self._call: tuple[str, str, list[str]] = ("", "", [])  # Id, name and pieces of the arguments of an open call.
        self.text, self.reasoning = "", ""
        self.calls: list[ToolCall] = []

    def push(self, piece: str) -> list[Delta]:
        """Add `piece`; return everything that is certain now."""
        self._buffer += piece
        return [*self._certain(self._run())]

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the answer.

        An incomplete call is dropped, and so is an incomplete mark before a call if more than half of it is there.
        """
        deltas = self._run()
        if self._step == self._native:
            deltas += self._native(is_over=True)
        rest, self._buffer = self._buffer, ""
        if self._step == self._reasoning:
            deltas += self._think(rest)
        elif self._step in (self._begin, self._text):
            if 2 * (begun := _begun(rest, self._trigger)) > len(self._trigger):
                rest = rest[: len(rest) - begun].rstrip()
            deltas += self._say(rest)
        return [*self._certain(deltas), *self._untagged()]

    @property
    def _trigger(self) -> str:
        return self._form.trigger if self._form is not None else ""

    def _run(self) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            step, before = self._step, len(self._buffer)
            deltas += step()
            if self._step == step and len(self._buffer) == before:
                return deltas

    def _certain(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Hold back text while it is nothing but calls in JSON."""
        for delta in deltas:
            if self._held is None or delta.reasoning:
                yield delta
                continue
            self._held += delta.text
            if delta.tool_call is not None or json_calls(self._held, self._tools) is None:
                text, self._held = self._held, None
                yield from [Delta(text=text)] if text else []
                yield from [delta] if delta.tool_call else []

    def _untagged(self) -> Iterator[Delta]:
        """At the end: what is held back as calls, if their arguments fit, or as text."""
        text, self._held = self._held or "", None
        calls = json_calls(text, self._tools) or []
        # Small models fall into repeating such a call until the token limit.
        calls = [call for at, call in enumerate(calls) if call not in calls[:at]]
        if calls and all(fits(arguments, self._tools[name]) for name, arguments in calls):
            self.text = ""
            for name, arguments in calls[: self._most_untagged]:
                call = ToolCall(_new_call_id(), name, arguments)
                yield Delta(tool_call=ToolCallDelta(len(self.calls), call.id, name))
                yield Delta(tool_call=ToolCallDelta(len(self.calls), arguments=json.dumps(arguments)))
                self.calls.append(call)
        elif text:
            yield Delta(text=text)

    def _begin(self) -> Iterator[Delta]:
        """At the start of the answer: it may be reasoning, a bare call, or text."""
        lead = self._buffer.lstrip()
        if self._thinks and lead.startswith(self._open):
            self._buffer, self._step = lead[len(self._open) :], self._reasoning
        elif self._thinks and self._open.startswith(lead):
            return
        elif self._form is not None and not self._form.trigger:
            self._begin_bare(self._form, lead)
        elif lead or not self._thinks:
            self._step = self._text
        yield from ()

    def _begin_bare(self, form: ToolFormat, lead: str) -> None:
        """For formats without an opening: the answer is a call if it begins like a call of an existing tool."""
        lead = lead.removeprefix(form.markers[0]).lstrip() if form.markers else lead
        head = form.head.match(lead)
        if head is not None:
            if json.loads(f'"{head[1]}"') in self._tools:
                self._buffer, self._step = lead, self._head
            else:
                self._step, self._form = self._text, None
        elif lead and not ('{"name":"'.startswith("".join(lead.split())[:9]) and lead.count('"') < 8):
            self._step, self._form = self._text, None  # It cannot go on to be the head of a call.

    def _reasoning(self) -> Iterator[Delta]:
        self._buffer = self._buffer if self.reasoning else self._buffer.lstrip("\n")
        thought, is_over = self._until(self._close)
        if is_over:
            thought = thought.rstrip("\n")
            self._step, self._thinks = self._after_thought, False
        yield from self._think(thought)

    def _after_thought(self) -> Iterator[Delta]:
        """Skip blank lines between reasoning and answer."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._begin
        yield from ()

    def _text(self) -> Iterator[Delta]:
        if self._trigger:
            text, calls = self._until(self._trigger)
            if calls:
                text, self._step = text.rstrip(), self._head
        else:
            text, self._buffer = self._buffer, ""
        yield from self._say(text)

    def _head(self) -> Iterator[Delta]:
        """Before a call: the next thing is a name."""
        if self._form is None:
            raise AssertionError("calls are read in a format")
        # The brace ends the call before, if calls are objects.
        for marker in ("}" if self._form.separator is None else "", self._form.trigger, self._form.closing.strip()):
            lead = self._buffer.lstrip()
            if marker and lead.startswith(marker):
                self._buffer = lead[len(marker) :]
        head = self._form.head.match(self._buffer)
        if head is None:
            return
        name = json.loads(f'"{head[1]}"') if self._form.separator is None else head[1]
        step = self._arguments if self._form.read is None else self._native
        self._buffer, self._step, self._scan = self._buffer[head.end() :], step, JsonScan()
        self._call = (_new_call_id(), name, [])
        yield Delta(tool_call=ToolCallDelta(len(self.calls), self._call[0], name))

    def _arguments(self) -> Iterator[Delta]:
        identity, name, pieces = self._call
        self._scan = self._scan.feed(self._buffer)
        end = self._scan.end
        piece, self._buffer = (self._buffer, "") if end is None else (self._buffer[:end], self._buffer[end:])
        if piece:
            pieces.append(piece)
            yield Delta(tool_call=ToolCallDelta(len(self.calls), arguments=piece))
        if end is not None:
            # Without a grammar, arguments may be invalid JSON; then there is no call.
            with suppress(ValueError):
                self.calls.append(ToolCall(identity, name, json.loads("".join(pieces))))
            self._step = self._head

    def _native(self, *, is_over: bool = False) -> Iterator[Delta]:
        """Inside a call with arguments in a syntax of its own: parse them when they are complete."""
        if self._form is None or self._form.read is None:
            raise AssertionError("arguments are read in a format")
        identity, name, _ = self._call
        ends = [match.span() for match in re.finditer(re.escape(self._form.ending), self._buffer)]
        for stop, rest in [*ends, (len(self._buffer), len(self._buffer))] if is_over else ends:
            try:
                arguments = self._form.read(self._buffer[:stop].strip(), self._tools.get(name, {}))
            except ValueError:  # The ending stood inside a string.
                continue
            yield Delta(tool_call=ToolCallDelta(len(self.calls), arguments=json.dumps(arguments)))
            self.calls.append(ToolCall(identity, name, arguments))
            self._step, self._buffer = self._head, self._buffer[rest:]
            return

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the text before `mark`; without the mark, keep trailing blanks and what may be its beginning."""
        before, separator, after = self._buffer.partition(mark)
        if separator:
            self._buffer = after
            return before, True
        stop = len(self._buffer[: len(self._buffer) - _begun(self._buffer, mark)].rstrip())
        before, self._buffer = self._buffer[:stop], self._buffer[stop:]
        return before, False

    def _say(self, text: str) -> Iterator[Delta]:
        if text:
            self.text += text
            yield Delta(text=text)

    def _think(self, text: str) -> Iterator[Delta]:
        if text:
            self.reasoning += text
            yield Delta(reasoning=text)


def _new_call_id() -> str:
    """Return a random id of nine letters and digits, as the strictest template family demands."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    return next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)


_PAIRS = ({"name", "arguments"}, {"name", "parameters"})
_CUT = 10
"""JSON with an error in so few last characters may only lack its rest, as in `fals`, `"\\u00e` and `1.5e-`."""
_BETWEEN = re.compile(r"(?:[\s,;\[\]]|`{1,3}(?:json)?|</tool_call>)*", re.IGNORECASE)
"""What may stand around calls: a list, code fences, closing tags."""


def json_calls(text: str, tools: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]] | None:
    """The complete calls in `text`, an answer or its beginning, each as the name of a tool and its arguments.

    Returns `None` unless it is nothing but calls, or may become so: JSON objects with the keys `name`, of one of
    `tools`, and `arguments` or `parameters`, an object or its JSON in a string; alone or in OpenAI's form
    (`{"type": "function", "function": ...}`); one or several, in a list, in code fences, or with a closing tag.
    """
    calls = list[tuple[str, Mapping[str, Any]]]()
    names = {"".join(json.dumps(name, ensure_ascii=is_ascii).split()) for name in tools for is_ascii in (True, False)}
    heads = ('{"arguments":', '{"parameters":', '{"type":"function"', *(f'{{"name":{name}' for name in names))
    decoder, rest = json.JSONDecoder(strict=False), text
    while rest := _BETWEEN.sub("", rest, count=1).rstrip():
        head = "".join(rest.split())
        if any(known.startswith(head.lower()) for known in ("json", "</tool_call>")):
            return calls
        if not any(known.startswith(head) or head.startswith(known) for known in heads):
            return None
        try:
            value, stop = decoder.raw_decode(rest)
            if (kind := value.pop("type", None)) == "function":
                value = value.get("function", value)
            arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
            arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        except (json.JSONDecodeError, RecursionError) as error:
            is_cut = isinstance(error, json.JSONDecodeError) and (
                error.pos > len(rest) - _CUT or error.msg.startswith("Unterminated string")
            )
            return calls if is_cut else None
        if kind not in (None, "function") or not isinstance(arguments, dict) or set(value) not in _PAIRS:
            return None
        if value["name"] not in [*tools]:
            return None
        calls.append((value["name"], arguments))
        rest = rest[stop:]
    return calls


def fits(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Whether `arguments` are valid for a tool with `parameters`, and are all among its properties if it lists any."""
    with needing("Tool calls need jsonschema", "tools"):
        from jsonschema.validators import validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    if "properties" in parameters and not {"allOf", "anyOf", "oneOf", "$ref"} & parameters.keys():
        parameters = {"additionalProperties": False, **parameters}
    try:
        # An empty registry loads nothing from outside.
        return bool(validator_for(parameters)(parameters, registry=Registry()).is_valid(arguments))
    except (Unresolvable, RecursionError, TypeError, re.error):  # The schema is at fault.
        return False


_END, _MESSAGE = "<|end|>", "<|message|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")


class HarmonyReader(AnswerReader):
    """Reads the channels of GPT-OSS ("Harmony").

    An answer is a sequence of messages, each `<|channel|>name ... <|message|>content<|end|>`. The channel `analysis` is
    reasoning, a message with a recipient (`to=functions.name`) is a call, and all others are text.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, untagged: int = 0) -> None:
        super().__init__(HARMONY, tools, thought=("", _END), untagged=untagged)
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
        if recipient is not None and recipient[1] in self._tools:
            self._step, self._call = self._native, (_new_call_id(), recipient[1], [])
            yield Delta(tool_call=ToolCallDelta(len(self.calls), self._call[0], recipient[1]))
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._step = self._reasoning
            yield from self._think("\n" if self.reasoning else "")
        else:
            self._step = self._text
            yield from self._say("\n\n" if self.text else "")
