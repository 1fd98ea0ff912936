"""The playground without its page: documents as packs, questions answered from packs and from text, edits, an agent."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kp_core import edit as editing
from kp_core.engines.explain import Explanation
from kp_core.engines.request import Generation
from kp_core.engines.session import Session
from kp_core.errors import FactError, SourceError
from kp_core.facts import Fact, MemoryFactStore
from kp_core.facts.embed import Embedder
from kp_core.facts.sources import read_facts
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.store import PackStore
from kp_core.packs.view import PackView
from kp_core.steering import Steering, preset
from kp_core.tools import Tool
from kp_serve.engine import VLLMEngine

__all__ = ["MOST_CHARACTERS", "SAMPLE", "Agent", "Answer", "Document", "Question", "Step", "Way", "World"]

Way: TypeAlias = Literal["packs", "text"]

SAMPLE = sorted(Path(__file__).with_name("sample").glob("*.md"))
"""Documents about an invented island, which no model knows."""
MOST_CHARACTERS = 200_000
"""Most characters at once. More would take a small machine minutes to compute."""

_NAMESPACE = "play"
_PART_TOKENS = 1200
_PARAGRAPH = 1000  # Characters that the embedder reads of a text.
_TICK_S = 0.1
_INSTRUCTION = "Answer the question in one short sentence, using the text above."

_MOST_SEARCHES = 5

_SEARCH = Tool(
    "search",
    "Find a page that says something about the words.",
    {"type": "object", "properties": {"words": {"type": "string", "maxLength": 40}}, "required": ["words"]},
)
_SYSTEM = "You answer questions from pages that you search for."
_ANSWER = "Now answer in one short sentence: "


@dataclass(frozen=True)
class Document:
    """A document, or a part of a long one, that one pack holds. `kv_bytes` is the size of its KV on disk."""

    name: str
    file: str
    handle: Handle
    tokens: int
    kv_bytes: int


@dataclass(frozen=True)
class Answer:
    """An answer so far: its text, and seconds since the call. `first` is the seconds until the first text, if any."""

    way: Way
    text: str = ""
    seconds: float = 0.0
    first: float | None = None
    generation: Generation | None = None

    @property
    def clock(self) -> float:
        """Seconds until the first text, or until now if there is none."""
        return self.seconds if self.first is None else self.first


@dataclass(frozen=True)
class Question:
    """A question with its documents: the arguments of `Session.stream` for each way, and the plan for packs."""

    text: str
    documents: tuple[Document, ...]
    requests: dict[Way, dict[str, Any]]
    plan: Explanation


class World:
    """Documents, their packs in a store under `folder`, and a model that answers from packs or from text.

    A document of more than 1,200 tokens, or more than a quarter of the model's positions, becomes several packs. A
    question finds paragraphs; the packs that hold them are sent.
    """

    def __init__(self, session: Session, embedder: Embedder, folder: Path) -> None:
        self.session, self.store, self.folder = session, PackStore(folder / "packs"), folder
        self.documents: dict[str, Document] = {}
        self._facts = MemoryFactStore(embedder)
        self._steerings: dict[str, Steering] = {}

    @property
    def address(self) -> str:
        """The address of the model's server; empty if it runs here."""
        engine = self.session.engine
        return engine.base_url if isinstance(engine, VLLMEngine) else ""

    @cached_property
    def view(self) -> PackView:
        """What the model may read: the packs of this playground."""
        return self.store.view(_NAMESPACE)

    def text_of(self, document: Document) -> str:
        """The text of a document, as the model reads it."""
        return self._pack(document).text

    def paste(self, text: str) -> Iterator[Document]:
        """Add a text that was typed or pasted, as `add` does."""
        if not text.strip():
            raise SourceError("Got nothing; expected some text, or a file.")
        words = re.sub(r"[^\w ]+", " ", text[:200]).split()
        file = self.folder / f"{' '.join(words)[:40].strip() or 'pasted'}.md"
        file.write_text(text, encoding="utf-8", errors="replace")
        try:
            yield from self.add([file])
        finally:
            file.unlink()

    def add(self, files: Iterable[Path]) -> Iterator[Document]:
        """Compile the packs of `files`, one after the other. A file replaces an earlier one of the same name.

        Nothing is added unless all files can be read. Raises `SourceError` for a file that holds no text or is of an
        unknown type, and for more than 200,000 characters.
        """
        facts_by_name, size, title = dict[str, list[Fact]](), 0, ""
        for file in files:
            name = file.name if file.name not in facts_by_name else f"{file.parent.name}/{file.name}"
            facts_by_name[name] = []
            for fact in self._read(file):
                facts_by_name[name].append(fact)
                size += len(fact.text) + len(fact.title) * (fact.title != title)
                title = fact.title
                if size > MOST_CHARACTERS:  # Stop reading: the file may go on without limit.
                    raise SourceError(
                        f"Got too many characters; the playground takes {MOST_CHARACTERS:,} at once. "
                        "`kp build` makes a collection of any size."
                    )
            if not facts_by_name[name]:
                raise SourceError(f"{file.name}: holds no text; expected at least a sentence.")
        for source, facts in facts_by_name.items():
            parts = list(self._parts(facts))
            names = [f"{source}, part {n}" if len(parts) > 1 else source for n in range(1, len(parts) + 1)]
            texts = [text for text, _ in parts]
            compiled = zip(
                names, parts, self.session.build_packs(texts, namespace=_NAMESPACE, progress=False), strict=True
            )
            removed = {name for name, document in self.documents.items() if document.file == source} - set(names)
            for name, (_, paragraphs), pack in compiled:
                self._keep(name, source, pack)
                self._forget_facts(name)
                self._facts.add(
                    [
                        replace(fact, id=f"{name}#{number}", source=name, namespace=_NAMESPACE, expires=None)
                        for number, fact in enumerate(paragraphs)
                    ],
                    overwrite=True,
                )
                yield self.documents[name]
            for name in removed:
                self._forget_facts(name)
                del self.documents[name]

    def ask(
        self, question: str, k: int = 1, *, composer: str = "exact", style: str = "formal", alpha: float = 0.0
    ) -> Question:
        """A question with the `k` documents that say most about it. Packs are steered with `alpha` times the preset
        `style`.

        Raises `FactError` for a blank question or without documents, and the errors of `Session.explain`.
        """
        documents = self.search(question, k)
        content = {
            "packs": "\n".join(str(document.handle) for document in documents),
            "text": "\n".join(self.text_of(document) for document in documents),
        }
        requests: dict[Way, dict[str, Any]] = {}
        for way, parts in content.items():
            message = f"{parts}\n\n{_INSTRUCTION}\nQuestion: {question.strip()}"
            requests[way] = {"messages": [{"role": "user", "content": message}], "max_tokens": 64}  # type: ignore[index]
        requests["packs"] |= {"view": self.view, "composer": composer, "recognise": False}
        if alpha:
            requests["packs"]["steering"] = (self._steering(style), alpha)
        requests["text"] |= {"reuse": False}
        return Question(question.strip(), tuple(documents), requests, self.session.explain(**requests["packs"]))

    def search(self, question: str, k: int, without: Iterable[str] = ()) -> list[Document]:
        """The `k` documents with the paragraphs nearest to `question`, best first, except those in `without`."""
        if not self.documents:
            raise FactError("There are no documents yet; add one first.")
        hits = self._facts.search(question, len(self._facts), namespace=_NAMESPACE)
        sources = dict.fromkeys(hit.fact.source for hit in hits)
        return [self.documents[name] for name in sources if name not in set(without)][:k]

    def watch(self, way: Way, request: dict[str, Any]) -> Generator[Answer, None, None]:
        """Yield the answer so far, ten times a second and at its end. Closing the iterator stops the answer."""
        cancel, pieces, future = threading.Event(), list[str](), Future[Generation]()

        def run() -> None:
            try:
                with closing(self.session.stream(**request, cancel=cancel)) as stream:
                    for piece in stream:
                        pieces.append(piece)
                    future.set_result(stream.result())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is read
                future.set_exception(error)

        began, answer = time.perf_counter(), Answer(way)
        threading.Thread(target=run, daemon=True, name="kp-play").start()
        try:
            while not future.done():
                yield answer
                wait([future], _TICK_S)
                seconds, text = time.perf_counter() - began, "".join(pieces)
                first = seconds if text and answer.first is None else answer.first
                answer = replace(answer, text=text, seconds=seconds, first=first)
            generation = future.result()
            yield replace(answer, text=generation.text, first=generation.usage.ttft_s, generation=generation)
        finally:
            cancel.set()

    def edit(self, name: str, old: str, new: str, how: editing.How = "amend") -> tuple[KnowledgePack, KnowledgePack]:
        """Correct `old` to `new` in a document (see `kp_core.edit`). Returns its pack before and after.

        Raises `PackError` for a statement that the document does not make exactly once, `FactError` without a document.
        """
        if name not in self.documents:
            raise FactError("There is no document to correct; add one, and choose it.")
        document = self.documents[name]
        pack = self._pack(document)
        edited = editing.edit(pack, old, new, self.session, how=how, compiled_for="user")
        self._keep(name, document.file, edited)
        for fact in list(self._facts.facts(where={"kp:source": name}, namespace=_NAMESPACE)):
            if fact.text.count(old) == 1:
                with suppress(FactError):  # Another paragraph already has this text.
                    self._facts.update(replace(fact, text=fact.text.replace(old, new)))
        return pack, edited

    def saying(self, statement: str) -> str | None:
        """The name of the first document that makes a statement exactly once."""
        for name, document in self.documents.items():
            pack = self.store.peek(document.handle)  # Its KV is not needed.
            if pack is not None and pack.text.count(statement) == 1:
                return name
        return None

    def _steering(self, style: str) -> Steering:
        if style not in self._steerings:
            self._steerings[style] = self.session.make_steering(preset(style), progress=False)
        return self._steerings[style]

    def _pack(self, document: Document) -> KnowledgePack:
        return self.store.get(document.handle, PackKey(self.session.fingerprint))

    def _keep(self, name: str, file: str, pack: KnowledgePack) -> None:
        """Store a pack and update its document. A server compiles on first use, so it reads the pack now."""
        handle = self.store.put(pack)
        if self.address:
            self.session.generate(str(handle), view=self.view, max_tokens=1)
        stored = self.store.peek(handle, PackKey(self.session.fingerprint))
        kv_bytes = 0 if stored is None else stored.stored_bytes
        self.documents[name] = Document(name, file, handle, len(pack.token_ids), kv_bytes)

    def _forget_facts(self, name: str) -> None:
        self._facts.delete([fact.id for fact in self._facts.facts(where={"kp:source": name}, namespace=_NAMESPACE)])

    def _read(self, file: Path) -> Iterator[Fact]:
        try:
            yield from read_facts(file, max_chars=_PARAGRAPH)
        except SourceError as error:
            # Do not show where an upload lies on this machine.
            raise SourceError(str(error).replace(str(file), file.name)) from error

    def _parts(self, facts: Iterable[Fact]) -> Iterator[tuple[str, list[Fact]]]:
        """Divide `facts` into pieces that fit one pack: the text of each, and its paragraphs."""
        max_tokens = min(_PART_TOKENS, self.session.max_positions // 4)
        text, paragraphs, tokens, title = "", list[Fact](), 0, ""
        for fact in facts:
            paragraph = fact.text if fact.title in ("", title) else f"{fact.title}\n{fact.text}"
            count = len(self.session.tokenizer.encode(paragraph, add_special_tokens=False))
            if paragraphs and tokens + count > max_tokens:
                yield text, paragraphs
                text, paragraphs, tokens = "", [], 0
            text = f"{text}\n{paragraph}" if text else paragraph
            paragraphs.append(fact)
            tokens, title = tokens + count, fact.title
        if paragraphs:
            yield text, paragraphs


@dataclass(frozen=True)
class Step:
    """A step of the agent: its search and what it found, or its answer; its cost; and the tokens of a text prompt."""

    number: int
    generation: Generation
    text_tokens: int
    words: str = ""
    found: str = ""


class Agent:
    """An agent that searches until it has read five documents, or all, and then answers.

    A small model would not decide by itself to go on, so this class decides. The prompt holds handles, and tool calls
    are compacted, so it does not grow. The same conversation is also counted as text.
    """

    def __init__(self, world: World, task: str) -> None:
        if not task.strip():
            raise FactError("Got no task; expected a question that the agent shall answer.")
        self.world, self.task, self.steps = world, task, list[Step]()
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": task.strip()},
        ]

    @property
    def is_done(self) -> bool:
        """Whether the agent has answered."""
        return bool(self.steps) and not self.steps[-1].words

    def step(self) -> Generator[Answer, None, None]:
        """Take the next step. Yields what the model writes, as it comes; at the end the step is in `steps`.

        Raises `FactError` if there is nothing to read, and the errors of `Session.stream`.
        """
        read_names = [step.found for step in self.steps]
        unread = self.world.search(self.task, 1, without=read_names) if len(read_names) < _MOST_SEARCHES else []
        instruction = [] if unread else [{"role": "user", "content": _ANSWER + self.task.strip()}]
        request: dict[str, Any] = {"messages": self._messages + instruction, "view": self.world.view, "max_tokens": 128}
        request |= {"tools": [_SEARCH], "tool_choice": "search" if unread else "none"}
        generation = None
        for answer in self.world.watch("packs", request | {"compact": True}):
            generation = answer.generation
            yield answer
        if generation is None:
            return
        rows = self.world.session.explain(**request).rows
        words = str(generation.tool_calls[0].arguments.get("words", "")) if generation.tool_calls else ""
        hits = self.world.search(words if words.strip() else self.task, 1, without=read_names) if unread else []
        for document in hits:
            call = {"type": "function", "id": "search", "function": {"name": "search", "arguments": {"words": words}}}
            self._messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "search", "tool_call_id": "search", "content": str(document.handle)},
            ]
        name = hits[0].name if hits else ""
        text_tokens = rows[-1].stop if rows else 0  # Positions in the plan count packs as their text.
        query = (words or self.task) if hits else ""
        self.steps.append(Step(len(self.steps) + 1, generation, text_tokens, query, name))
