"""Chat messages and packs to one canonical prompt; the only place that knows chat templates.

The canonical prompt is the conversation with every handle replaced by its text, rendered by the model's chat template
in one call and tokenised once (Knowledge Packs, arXiv 2604.03270, on the chat template).
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

from kp_core.errors import ContextOverflowError, PromptError, ShortTextError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack, Prefix, common_length
from kp_core.packs.view import PackRef, PackView
from kp_core.prompt.conversation import (
    SLOT,
    Message,
    Placement,
    Turn,
    filled,
    map_strings,
    placed,
    schema_instruction,
    with_errata,
    with_instruction,
)
from kp_core.prompt.encoding import PromptEncoder, insert
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.shims import TurnShaper
from kp_core.tools import AnswerShape, ToolFormat, format_of, thought_of

# Texts that may follow a pack. Tokens that survive all of these are the pack's own (see `tokenise_pack`).
_ANY_FOLLOWER = ("\n", "\n\n", " ", "  ", "a", "A", " a", "1", ".", ",", ")", "'", '"', "-", "é", "中")
# After a final line feed only the next pack or the caller's system message can follow, which begin with a letter or a
# sign.
_PRINTED_FOLLOWER = tuple(follower for follower in _ANY_FOLLOWER if not follower.isspace() and follower[0] != " ")
_PROBE = "The lighthouse keeper counts ships, and writes each of them into a long book."
_MOST_PREFIXES = 64
_FREE = AnswerShape()
_Inputs: TypeAlias = tuple[list[dict[str, Any]], Mapping[str, Any]]

logger = logging.getLogger(__name__)


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template, and finds packs in the tokens.

    `options` are passed to the template, e.g. `date_string`. What a template lacks (roles, tool calls) is rendered as
    `kp_core.prompt.shims` states. Raises `PromptError` if there is no template or it refuses.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:  # noqa: ANN401
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                "The tokenizer has no chat template; answers of a chat model depend on it. Set "
                "`tokenizer.chat_template` to the model's Jinja template."
            )
        self.tokenizer: Any = tokenizer
        self._options = dict(options or {})
        self._encoder = PromptEncoder(tokenizer, self._written())
        self._shaper = TurnShaper(self._render)
        self.tool_format: ToolFormat = format_of(self.source) if self._shaper.shows_calls else format_of("")
        """How the model writes tool calls."""
        self.thought = thought_of(self.source)
        """The marks around reasoning at the beginning of an answer, or `None`."""
        self._warned: set[str] = set()
        self._prefixes: dict[Hashable, Prefix] = {}
        self.carries_packs = self._finds_packs()
        """Whether packs can be found in prompts. A template that changes the text of messages hides them, and they go
        as text."""

    @property
    def source(self) -> str:
        """The Jinja source of the template."""
        source = self.tokenizer.chat_template
        return source if isinstance(source, str) else repr(sorted(source.items()))

    @property
    def digest(self) -> str:
        """Digest of source and options."""
        return blake2b((self.source + repr(sorted(self._options.items()))).encode(), digest_size=16).hexdigest()

    def render(
        self,
        messages: Sequence[Message] | str,
        *,
        view: PackView | None = None,
        packs: Sequence[PackRef] = (),
        placement: Placement = "in_place",
        **options: Any,  # noqa: ANN401
    ) -> Prompt:
        """Return the canonical prompt of `messages`: `placed`, then `render_turns` with `options`; raises as these."""
        return self.render_turns(placed(messages, view=view, packs=packs, placement=placement), **options)

    def render_turns(
        self,
        turns: Sequence[Turn],
        *,
        shape: AnswerShape = _FREE,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Return the canonical prompt of a conversation.

        The template shows the tools of `shape` if it can; otherwise the end of the system message lists them. The
        schema of the answer goes there, too. `thinking` is a switch of some templates. Raises `PromptError`.
        """
        turns, switches = with_errata(turns), dict[str, Any]()
        if thinking is not None:
            if not self.thinking_switch:
                raise PromptError("This chat template has no thinking switch; leave `thinking` unset.")
            switches[self.thinking_switch] = thinking
        if shape.tools:
            turns = self._shaper.offer(turns, shape.tools, self.tool_format)
            if self._shaper.takes_tools:
                switches["tools"] = map_strings([tool.to_dict() for tool in shape.tools], self._encoder.escape)
        if shape.schema is not None:
            turns = with_instruction(turns, schema_instruction(shape.schema))
        prompt = self._prompt(self._shaper.shape(turns), switches, add_generation_prompt=add_generation_prompt)
        head = next(iter(prompt.breaks), len(prompt)) if any(tool.marked for tool in shape.tools) else 0
        return replace(prompt, marked=max(prompt.marked, head))

    def tokenise_pack(
        self,
        text: str,
        compiled_for: Sequence[Message] | Literal["user", "system"] = "user",
        *,
        most: int | None = None,
    ) -> tuple[Prefix, tuple[int, ...]]:
        """Return the tokens before a pack of `text` at the position `compiled_for`, and its own tokens.

        `compiled_for` is `"user"` (the start of a user message), `"system"` (memory, at the start of the system
        message), or messages that contain `{pack}` once. Its own tokens are those that stay the same whatever follows
        the pack. Raises `ShortTextError` for a text without such tokens, `ContextOverflowError` if prefix and pack have
        more than `most` tokens.
        """
        if not isinstance(text, str):
            raise PromptError(f"Got {text!r} as the text of a pack; expected a string.")
        if not text.strip():
            raise PromptError("Got a blank text; expected something to know.")
        if isinstance(compiled_for, str) and compiled_for not in {"user", "system"}:
            raise PromptError(
                f"Got compiled_for={compiled_for!r}; expected 'user', 'system' or messages with {{pack}}."
            )
        if compiled_for == "system":
            messages: Sequence[Message] = ({"role": "system", "content": SLOT}, {"role": "user", "content": "?"})
        else:
            messages = ({"role": "user", "content": SLOT},) if isinstance(compiled_for, str) else compiled_for
        pack = KnowledgePack(text, "probe", (), (), ModelFingerprint.unknown())
        reference = PackRef("", pack, memory=compiled_for == "system")
        prompt = self._prompt(self._shaper.shape(filled(messages, reference)), {}, add_generation_prompt=True)
        if not self.carries_packs:
            raise ShortTextError("The chat template changes the text of messages, so no pack can be found in a prompt.")
        if not prompt.spans:
            raise ShortTextError(f"The text {text[:40]!r} has no token of its own at this position of the template.")
        span = prompt.spans[0]
        if most is not None and span.stop > most:
            raise ContextOverflowError(span.stop, 0, most)
        runs = [prompt.token_ids[span.start : span.stop]]
        before, after = prompt.rendered[: span.chars[1]], prompt.rendered[span.chars[1] :]
        # Some templates trim the end of the line.
        ends_line = compiled_for == "system" and before.endswith("\n")
        for follower in _PRINTED_FOLLOWER if ends_line else _ANY_FOLLOWER:
            encoded = self._encoder.encode(before + follower + after)
            runs.append(encoded.ids[span.start : encoded.token_until(span.chars[1])])
        token_ids = runs[0][: min(common_length(runs[0], run) for run in runs)]
        if not token_ids:
            raise ShortTextError(f"The text {text[:40]!r} is too short: what follows it may change every token.")
        return prompt.token_ids[: span.start], token_ids

    def prefix(self, compiled_for: Sequence[Message] | Literal["user", "system"] = "user") -> Prefix:
        """Return the tokens before a pack at the position `compiled_for`, computed once; raises as `tokenise_pack`.

        A text whose first characters share a token with the text before it has a shorter prefix.
        """
        # Some templates print the date.
        key = (self.source, repr(compiled_for), datetime.now().astimezone().date())
        if key not in self._prefixes:
            if len(self._prefixes) >= _MOST_PREFIXES:
                self._prefixes.clear()
            self._prefixes[key], _ = self.tokenise_pack(_PROBE, compiled_for)
        return self._prefixes[key]

    def ends(self, prompt: Prompt) -> tuple[int, ...]:
        """For each pack, return the end of its text and the blanks behind it, in tokens, within its message."""
        encoded, stops = self._encoder.encode(prompt.rendered), []
        edges = sorted({*prompt.breaks, *(span.start for span in prompt.spans), len(prompt)})
        for span in prompt.spans:
            behind = prompt.rendered[span.chars[1] :]
            until = encoded.token_until(span.chars[1] + len(behind) - len(behind.lstrip()))
            stops.append(max(span.stop, min(until, next(at for at in edges if at >= span.stop))))
        return tuple(stops)

    def text(self, prompt: Prompt) -> str:
        """Return the rendered conversation of `prompt`, readable."""
        return self._encoder.unescape(prompt.rendered)

    def verify(self, prompt: Prompt) -> tuple[tuple[str, str], ...]:
        """Check that `prompt` is the single-pass tokenisation of its text; raises `PromptError` if it is not.

        Returns for each pack the text that is delivered as KV, and that at its edges which is prefilled with others.
        """
        encoded = self._encoder.encode(prompt.rendered)
        got, expected, texts = prompt.token_ids, encoded.ids, list[tuple[str, str]]()
        if (at := common_length(got, expected)) < min(len(got), len(expected)):
            raise PromptError(f"Token {at} of the prompt is {got[at]}; the single pass gives {expected[at]}.")
        if len(got) != len(expected):
            raise PromptError(f"The prompt has {len(got)} tokens; the single pass gives {len(expected)}.")
        for span in prompt.spans:
            delivered = encoded.text_of(span.start, span.stop)
            before, middle, after = span.reference.text.partition(delivered)
            if not middle:
                raise PromptError(
                    f"The span of {span.handle} holds {delivered[:40]!r}, which is not in the pack's text."
                )
            texts.append((delivered, before + after))
        return tuple(texts)

    @property
    def thinking_switch(self) -> str:
        """Name of the template's switch for thinking; empty if it has none."""
        if "enable_thinking" in self.source:
            return "enable_thinking"
        return "thinking" if "thinking is defined" in self.source else ""  # DeepSeek's name for it.

    def _prompt(self, turns: Sequence[Turn], switches: Mapping[str, Any], *, add_generation_prompt: bool) -> Prompt:
        options = {**switches, "add_generation_prompt": add_generation_prompt}
        text, change = self._guarded([self._message(turn) for turn in turns], options)
        references = [segment for turn in turns for segment in turn.segments if isinstance(segment, PackRef)]
        # Letters of both cases reveal a template that changes case.
        sign = f"<{secrets.token_hex(8)}Mm:"
        marks_by_turn = _marks(turns)
        signs = [[(at, f"{sign}{mark}>") for at, mark in marks] for marks in marks_by_turn]
        pairs = enumerate(zip(turns, signs, strict=True))
        marked = [self._message(turn, inside, f"{sign}c{at}>") for at, (turn, inside) in pairs]
        stripped, places = _unmarked(self._render(*change((marked, options))), sign)
        if stripped == text and (lost := self._lost(turns, marks_by_turn, places)):
            return self._prompt(self._shaper.moved(turns, lost), switches, add_generation_prompt=add_generation_prompt)
        # A template that treats marked text differently hides where packs are; they then go as text.
        packs, begins = _places(references, text, places) if stripped == text else ([], {})
        if stripped != text:
            self._warn("packs cannot be found in its prompts, and go as text; what it leaves out is not noticed")
        encoded = self._encoder.encode(text)
        spans = []
        # A pack that goes as text still belongs to its namespace. If packs cannot be found, their namespaces own the
        # first tokens and so the whole prompt, because the prefix tree is searched from the first token on.
        texts = [] if stripped == text else [Span(at, at + 1, ref) for at, ref in enumerate(references)]
        for start, stop, reference in packs:
            begin, first, last = encoded.token_until(start), encoded.token_at(start), encoded.token_until(stop)
            if begin < first:  # It shares a token with the text before it.
                texts.append(Span(begin, first, reference))
            if self._encoder.unescape(text[start:stop]) not in reference.text:
                self._warn("packs that it changes go as text")  # E.g. tool results, which it may write as JSON.
                texts.append(Span(first, max(first, last), reference))
                continue
            ids = reference.pack.token_ids
            # At the start of the system message some templates trim the end of the pack.
            is_its_place = not reference.memory or reference.pack.prefix == encoded.ids[:first]
            if is_its_place and ids and encoded.ids[first : min(last, first + len(ids))] == ids:
                last = first + len(ids)
            if last > first:
                spans.append(Span(first, last, reference, (start, stop)))
        begun = {encoded.token_at(char): index for char, index in sorted(begins.items())}
        breaks, last = tuple(sorted(begun)), max((at for at, turn in enumerate(turns) if turn.marked), default=-1)
        roles = tuple(turns[begun[at]].role for at in breaks)
        until = next((at for at in breaks if begun[at] > last), len(encoded.ids)) if last >= 0 else 0
        return Prompt(encoded.ids, tuple(spans), breaks, text, tuple(texts), roles=roles, marked=until)

    def _lost(
        self, turns: Sequence[Turn], marks: Sequence[Sequence[tuple[int, str]]], places: Mapping[str, list[int]]
    ) -> list[int]:
        """Return the turns with calls, system messages and results that the template left out; raises for others."""
        lost = []
        for at, turn in enumerate(turns):
            if f"c{at}" not in places and _signed(turn.tool_calls, "c") != [*turn.tool_calls]:
                lost.append(at)
                continue
            expected = {mark for _, mark in marks[at] if mark[0] in ("k" if turn.role == "assistant" else "mk")}
            if not expected or expected & places.keys():
                continue
            if turn.role in ("system", "tool"):
                lost.append(at)
            elif turn.tool_calls:
                self._warn("tool calls", "This chat template does not show the text beside %s.")
            else:
                raise PromptError(
                    f"The chat template leaves out message {at} ({turn.role}): {turn.content[:40]!r}. Leave it out "
                    "of the conversation, or use a template that shows it."
                )
        return lost

    def _message(self, turn: Turn, signs: Sequence[tuple[int, str]] = (), call_sign: str = "") -> dict[str, Any]:
        """Return the message of `turn`: packs as their text, `signs` at their positions, `call_sign` in each call."""
        # Guards are inserted before signs, so that a pack's trailing blanks are found directly behind its last sign.
        is_answer = turn.role == "assistant"
        guards = [(at, self._encoder.guard) for at in self._encoder.guards(turn.content, own=is_answer)]
        content, escape = insert(turn.content, (*guards, *signs)), self._encoder.escape
        message: dict[str, Any] = {"role": turn.role, "content": content, **map_strings(dict(turn.extra), escape)}
        if turn.tool_calls:
            message["tool_calls"] = _signed(map_strings(turn.tool_calls, escape), call_sign)
        return message

    def _guarded(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any]
    ) -> tuple[str, Callable[[_Inputs], _Inputs]]:
        """Render `messages`; returns the text, and the change made to them and to `options` for it.

        A template that changes case or cuts text breaks guards, which a rendering with guards of another length
        reveals. Then blanks replace the guards.
        """
        text, inputs = self._render(messages, options), (messages, options)
        guard, other_guard = self._encoder.guard, self._encoder.other_guard
        changed = _replaced(inputs, guard, other_guard)
        if changed == inputs or self._render(*changed).replace(other_guard, guard) == text:
            return text, lambda given: given
        self._warn("control tokens in data are kept apart from its own by blanks")
        return self._render(*_replaced(inputs, guard, " ")), lambda given: _replaced(given, guard, " ")

    def _finds_packs(self) -> bool:
        text = "Of <|every|> Ship that lies in the Harbour, the Keeper writes down who is its Master. " * 4
        reference = PackRef("", KnowledgePack(text, "probe", (), (), ModelFingerprint.unknown()))
        turns = self._shaper.shape((Turn("user", ("Read this:\n", reference, "\nWho?")),))
        try:
            return bool(self._prompt(turns, {}, add_generation_prompt=True).spans)
        except PromptError:  # The template may refuse this probe and accept other conversations.
            return True

    def _warn(self, what: str, message: str = "This chat template changes the text of messages: %s.") -> None:
        """Log a warning of one kind once."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, what)

    def _written(self) -> str:
        """Return all literal text of the template, or of all templates if there are several."""
        source = self.tokenizer.chat_template
        try:
            return "".join(map(_literals, [source] if isinstance(source, str) else source.values()))
        except Exception as error:
            raise PromptError(f"The chat template is no template of Jinja: {error}") from error

    def _render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, **self._options, **options}
        tokens = getattr(self.tokenizer, "special_tokens_map", {})
        try:
            source = self.tokenizer.get_chat_template(tools=variables["tools"])
            return str(_compiled(source).render({**tokens, "messages": messages, **variables}))
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise PromptError(f"The chat template refused a conversation of [{roles}]: {error}") from error


def _compiled(source: str) -> Any:  # noqa: ANN401 - a template of Jinja
    """A chat template, which is code that comes with a model, in the sandbox of transformers.

    It limits what the template reaches, neither its time nor its memory.
    """
    # Loads Jinja only when something is rendered.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)


@lru_cache
def _literals(source: str) -> str:
    """All literal text of a template, joined by null characters."""
    from jinja2 import nodes

    tree = _compiled(source).environment.parse(source)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(texts))


def _replaced(inputs: _Inputs, old: str, new: str) -> _Inputs:
    messages, options = map_strings(inputs, lambda text: text.replace(old, new))
    return messages, options


def _marks(turns: Sequence[Turn]) -> list[list[tuple[int, str]]]:
    """For each turn, return the marks where packs begin and end (`b0`, `e0`, …) and messages begin (`m0`, `m1`, …).

    Opening system messages and answers have a mark `k0`, `k1`, … at their end, because templates look at the beginning
    of the former and cut reasoning from the beginning of the latter. An answer that may be nothing but reasoning has
    none: a mark would make it look like more.

    A mark stands inside the outer blanks of its text, so that templates which trim see the same blanks.
    """
    by_turn: list[list[tuple[int, str]]] = []
    number = 0
    for index, turn in enumerate(turns):
        marks, at = [], 0
        if (index or turn.role != "system") and turn.content.strip():
            marks.append((_leading(turn.content), f"m{index}"))
        for segment in turn.segments:
            if isinstance(segment, PackRef):
                text = segment.text
                marks += [(at + _leading(text), f"b{number}"), (at + len(text.rstrip()), f"e{number}")]
                number += 1
            at += len(segment.text if isinstance(segment, PackRef) else segment)
        end = turn.content.rstrip()
        is_answer = turn.role == "assistant" and not end.endswith((">", "]"))
        if end and (is_answer or (turn.role == "system" and not index)):
            marks.append((len(end), f"k{index}"))
        by_turn.append(marks)
    return by_turn


def _signed(calls: Sequence[Mapping[str, Any]], sign: str) -> list[Mapping[str, Any]]:
    """Return `calls` with `sign` in the first text among the arguments of each, if there is one."""
    marked: list[Mapping[str, Any]] = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = sign + arguments
        elif isinstance(arguments, Mapping) and (
            texts := [key for key, value in arguments.items() if isinstance(value, str) and value.strip()]
        ):
            text = arguments[texts[0]]
            arguments = {**arguments, texts[0]: insert(text, [(_leading(text), sign)])}
        marked.append({**call, "function": {**call["function"], "arguments": arguments}})
    return marked


def _unmarked(marked: str, sign: str) -> tuple[str, dict[str, list[int]]]:
    """Return the text without marks, and the positions of each mark in it."""
    text, *pieces = marked.split(sign)
    positions = defaultdict[str, list[int]](list)
    for piece in pieces:
        mark, _, plain = piece.partition(">")
        positions[mark].append(len(text))
        text += plain
    return text, positions


def _places(
    references: Sequence[PackRef], text: str, found: Mapping[str, list[int]]
) -> tuple[list[tuple[int, int, PackRef]], dict[int, int]]:
    """Return where packs are, as `(start, stop, pack)` in characters of `text`, and which turn begins where."""
    packs = []
    for number, reference in enumerate(references):
        begins, ends = found.get(f"b{number}"), found.get(f"e{number}")
        if begins and ends:
            pack_text, start, stop = reference.text, begins[-1], ends[-1]
            lead, trail = pack_text[: _leading(pack_text)], pack_text[len(pack_text.rstrip()) :]
            # The pack's own outer blanks count if the template kept them.
            start -= len(lead) if text[:start].endswith(lead) else 0
            stop += len(trail) if text.startswith(trail, stop) else 0
            packs.append((start, stop, reference))
    return packs, {at: int(mark[1:]) for mark, positions in found.items() if mark[0] == "m" for at in positions}


def _leading(text: str) -> int:
    return len(text) - len(text.lstrip())
