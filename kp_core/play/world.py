"""What the playground knows and does, without a page: documents as packs, questions answered both ways, edits."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Generator, Iterable, Iterator
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

__all__ = ["MOST_CHARACTERS", "SAMPLE", "Answer", "Document", "Question", "Way", "World"]

Way: TypeAlias = Literal["packs", "text"]

SAMPLE = sorted(Path(__file__).with_name("sample").glob("*.md"))
"""Documents about an island that does not exist, so that no model knows them."""
MOST_CHARACTERS = 200_000
"""More than this at once would be minutes of computing on a small machine."""

_NAMESPACE = "play"
_PART_TOKENS = 1200
_PARAGRAPH = 1000  # Characters: what the embedder reads of a text.
_TICK_S = 0.1
_INSTRUCTION = "Answer the question in one short sentence, using the text above."


@dataclass(frozen=True)
class Document:
    """A document, or a part of a long one: what one pack holds. `kv_bytes` are those of its KV on disk."""

    name: str
    file: str
    handle: Handle
    tokens: int
    kv_bytes: int


@dataclass(frozen=True)
class Answer:
    """An answer so far: its text, and seconds since the call; `first` until the first text, once there is any."""

    way: Way
    text: str = ""
    seconds: float = 0.0
    first: float | None = None
    generation: Generation | None = None


@dataclass(frozen=True)
class Question:
    """A question with the documents it goes with: what `Session.stream` takes for each way, and the plan for packs."""

    text: str
    documents: tuple[Document, ...]
    requests: dict[Way, dict[str, Any]]
    plan: Explanation


class World:
    """Documents, their packs in a store under `folder`, and a model that answers from both.

    A document of more than 1,200 tokens, or a fourth of what the model can read, becomes several packs. Questions find
    paragraphs, and the packs that hold them are sent.
    """

    def __init__(self, session: Session, embedder: Embedder, folder: Path) -> None:
        self.session, self.store, self.folder = session, PackStore(folder / "packs"), folder
        self.documents: dict[str, Document] = {}
        self._facts = MemoryFactStore(embedder)
        self._steerings: dict[str, Steering] = {}

    @property
    def address(self) -> str:
        """Where the model is, if it is on a server."""
        return str(getattr(self.session.engine, "base_url", ""))

    @cached_property
    def view(self) -> PackView:
        """What the model may read: the packs of this playground."""
        return self.store.view(_NAMESPACE)

    def text_of(self, document: Document) -> str:
        """What a document says, as the model reads it."""
        return self._pack(document).text

    def paste(self, text: str) -> Iterator[Document]:
        """Take in a text that was typed or pasted; as `add`."""
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
        """Compile the packs of `files`, one after the other; a file of a name that is there already takes its place.

        Nothing is taken in unless all files can be read. Raises `SourceError` for a file that holds no text, is of a
        type that is not read, or for more than 200,000 characters.
        """
        read, size, title = dict[str, list[Fact]](), 0, ""
        for file in files:
            name = file.name if file.name not in read else f"{file.parent.name}/{file.name}"
            read[name] = []
            for fact in self._read(file):
                read[name].append(fact)
                size += len(fact.text) + len(fact.title) * (fact.title != title)
                title = fact.title
                if size > MOST_CHARACTERS:  # Whoever wrote the file decides how much more there is.
                    raise SourceError(
                        f"Got too many characters; the playground takes {MOST_CHARACTERS:,} at once. "
                        "`kp build` makes a collection of any size."
                    )
            if not read[name]:
                raise SourceError(f"{file.name}: holds no text; expected at least a sentence.")
        for source, facts in read.items():
            parts = list(self._parts(facts))
            names = [f"{source}, part {n}" if len(parts) > 1 else source for n in range(1, len(parts) + 1)]
            texts = [text for text, _ in parts]
            made = zip(names, parts, self.session.build_packs(texts, namespace=_NAMESPACE, progress=False), strict=True)
            gone = [name for name, document in self.documents.items() if document.file == source]
            for name, (_, paragraphs), pack in made:
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
            for name in set(gone) - set(names):
                self._forget_facts(name)
                del self.documents[name]

    def ask(
        self, question: str, k: int = 1, *, composer: str = "exact", style: str = "formal", alpha: float = 0.0
    ) -> Question:
        """A question with the `k` documents that say most about it; packs are steered with `alpha` times a preset.

        Raises `FactError` for a blank question and without documents, and as `Session.explain`.
        """
        found = self.search(question, k)
        content = {
            "packs": "\n".join(str(document.handle) for document in found),
            "text": "\n".join(self.text_of(document) for document in found),
        }
        asked: dict[Way, dict[str, Any]] = {}
        for way, parts in content.items():
            message = f"{parts}\n\n{_INSTRUCTION}\nQuestion: {question.strip()}"
            asked[way] = {"messages": [{"role": "user", "content": message}], "max_tokens": 64}  # type: ignore[index]
        asked["packs"] |= {"view": self.view, "composer": composer, "recognise": False}
        if alpha:
            asked["packs"]["steering"] = (self._steering(style), alpha)
        asked["text"] |= {"reuse": False}
        return Question(question.strip(), tuple(found), asked, self.session.explain(**asked["packs"]))

    def search(self, question: str, k: int, without: Iterable[str] = ()) -> list[Document]:
        """The `k` documents with the paragraphs nearest to `question`, best first, but for those named."""
        if not self.documents:
            raise FactError("There are no documents yet; add one first.")
        hits = self._facts.search(question, len(self._facts), namespace=_NAMESPACE)
        named = dict.fromkeys(hit.fact.source for hit in hits)
        return [self.documents[name] for name in named if name not in set(without)][:k]

    def watch(self, way: Way, request: dict[str, Any]) -> Generator[Answer, None, None]:
        """The answer so far, ten times a second and with each piece of text; closing the iterator ends the answer."""
        cancel, came = threading.Event(), queue.SimpleQueue[str | Generation | BaseException]()

        def run() -> None:
            try:
                with closing(self.session.stream(**request, cancel=cancel)) as stream:
                    for piece in stream:
                        came.put(piece)
                    came.put(stream.result())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is read
                came.put(error)

        began, answer = time.perf_counter(), Answer(way)
        threading.Thread(target=run, daemon=True, name="kp-play").start()
        try:
            while answer.generation is None:
                yield answer
                with suppress(queue.Empty):
                    new = came.get(timeout=_TICK_S)
                    if isinstance(new, BaseException):
                        raise new
                    if isinstance(new, Generation):
                        answer = replace(answer, text=new.text, first=new.usage.ttft_s, generation=new)
                    else:
                        first = time.perf_counter() - began if answer.first is None else answer.first
                        answer = replace(answer, text=answer.text + new, first=first)
                answer = replace(answer, seconds=time.perf_counter() - began)
            yield answer
        finally:
            cancel.set()

    def edit(self, name: str, old: str, new: str, how: editing.How = "amend") -> tuple[KnowledgePack, KnowledgePack]:
        """The pack of a document before and after `old` was corrected to `new` (see `kp_core.edit`).

        Raises `PackError` for a statement that the document does not make exactly once.
        """
        if name not in self.documents:
            raise FactError("There is no document to correct; add one, and choose it.")
        document = self.documents[name]
        pack = self._pack(document)
        made = editing.edit(pack, old, new, self.session, how=how, compiled_for="user")
        self._keep(name, document.file, made)
        for fact in list(self._facts.facts(where={"kp:source": name}, namespace=_NAMESPACE)):
            if fact.text.count(old) == 1:
                with suppress(FactError):  # Another paragraph says just that, and is found as well.
                    self._facts.update(replace(fact, text=fact.text.replace(old, new)))
        return pack, made

    def saying(self, statement: str) -> str | None:
        """The first document that makes a statement exactly once."""
        for name, each in self.documents.items():
            pack = self.store.peek(each.handle)  # Its KV is not needed.
            if pack is not None and pack.text.count(statement) == 1:
                return name
        return None

    def plain_tokens(self, messages: list[dict[str, Any]], **options: Any) -> int:  # noqa: ANN401 - of `Request`
        """How many tokens a conversation has as plain text; nothing is computed."""
        rows = self.session.explain(messages, **options).rows
        return rows[-1].stop if rows else 0

    def _steering(self, style: str) -> Steering:
        if style not in self._steerings:
            self._steerings[style] = self.session.make_steering(preset(style), progress=False)
        return self._steerings[style]

    def _pack(self, document: Document) -> KnowledgePack:
        return self.store.get(document.handle, PackKey(self.session.fingerprint))

    def _keep(self, name: str, file: str, pack: KnowledgePack) -> None:
        """Store a pack and say so of its document; a server, which compiles on use, reads it now."""
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
            # Where an upload lies on this machine is nothing to read for people.
            raise SourceError(str(error).replace(str(file), file.name)) from error

    def _parts(self, facts: Iterable[Fact]) -> Iterator[tuple[str, list[Fact]]]:
        """`facts` in pieces that one pack may hold: the text of each, and its paragraphs."""
        most = min(_PART_TOKENS, self.session.max_positions // 4)
        text, paragraphs, tokens, title = "", list[Fact](), 0, ""
        for fact in facts:
            headed = fact.text if fact.title in ("", title) else f"{fact.title}\n{fact.text}"
            count = len(self.session.tokenizer.encode(headed, add_special_tokens=False))
            if paragraphs and tokens + count > most:
                yield text, paragraphs
                text, paragraphs, tokens = "", [], 0
            text = f"{text}\n{headed}" if text else headed
            paragraphs.append(fact)
            tokens, title = tokens + count, fact.title
        if paragraphs:
            yield text, paragraphs
