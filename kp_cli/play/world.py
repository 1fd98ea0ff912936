"""The playground without its page: documents become packs, and questions are answered from packs and from text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kp_cli.sources import read_facts
from kp_core import Embedder, Fact, Handle, Hit, MemoryFactStore, PackStore, Session
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError
from kp_core.packs.pack import PackKey
from kp_core.session.explain import Explanation

Way: TypeAlias = Literal["packs", "text"]

SAMPLE = sorted(Path(__file__).with_name("sample").glob("*.md"))
"""Documents about an invented island, which no model knows."""
QUESTIONS = ("Who is the harbour master?", "Who is the miller?", "Where is the kelp mill?")
"""Questions about them."""
MOST_CHARACTERS = 200_000
"""Most characters at once. More would take a small machine minutes to compute."""

_NAMESPACE = "play"
_PART_TOKENS = 1200
_NAMED = 3  # Of what could not be read.
_PARAGRAPH = 1000  # Characters that the embedder reads of a text.
_INSTRUCTION = "Answer the question in one short sentence, using the text above."


@dataclass(frozen=True)
class Document:
    """A document, or a part of a long one, that one pack holds. `kv_bytes` is the size of its KV on disk."""

    name: str
    file: str
    text: str
    handle: Handle
    tokens: int
    kv_bytes: int


class World:
    """Documents, their packs in a store under `folder`, and a model that answers from packs or from text.

    A document of more than 1,200 tokens, or more than a quarter of the model's positions, becomes several packs. A
    question finds paragraphs; the packs that hold them are sent. `address` is that of the model's server, if it runs on
    one.
    """

    def __init__(self, session: Session, embedder: Embedder, folder: Path, address: str = "") -> None:
        self.session, self.store, self.folder = session, PackStore(folder / "packs"), folder
        self.documents: dict[str, Document] = {}
        self.address = address
        self._view = self.store.view(_NAMESPACE)
        facts = MemoryFactStore(embedder)
        self._delivery = Delivery(facts, session, self.store, unit="document", namespace=_NAMESPACE)

    def paste(self, text: str) -> Iterator[Document]:
        """Add a text that was typed or pasted, as `add` does."""
        if not text.strip():
            raise FactError("Got nothing; expected some text, or a file.")
        words = re.sub(r"[^\w ]+", " ", text[:200]).split()
        file = self.folder / f"{' '.join(words)[:40].strip() or 'pasted'}.md"
        file.write_text(text, encoding="utf-8", errors="replace")
        try:
            yield from self.add([file])
        finally:
            file.unlink()

    def add(self, files: Iterable[Path]) -> Iterator[Document]:
        """Compile the packs of `files`, one after the other. A file replaces an earlier one of the same name.

        A file that cannot be read, is of an unknown type or holds no text is left out: behind the others `FactError`
        names it. More than 200,000 characters raise it before anything is added.
        """
        facts_by_name, size, unread = dict[str, list[Fact]](), 0, list[str]()
        for file in files:
            name = file.name if file.name not in facts_by_name else f"{file.parent.name}/{file.name}"
            facts, title = facts_by_name.setdefault(name, []), ""
            try:
                for fact in self._read(file):
                    facts.append(fact)
                    size += len(fact.text) + len(fact.title) * (fact.title != title)
                    title = fact.title
                    if size > MOST_CHARACTERS:  # Stop reading: the file may go on without limit.
                        break
            except FactError as error:
                facts.clear()
                unread.append(str(error))
            if size > MOST_CHARACTERS:
                raise FactError(
                    f"Got too many characters; the playground takes {MOST_CHARACTERS:,} at once. "
                    "`kp build` makes a collection of any size."
                )
        for source, facts in facts_by_name.items():
            if not facts:
                continue
            try:
                yield from self._compile(source, list(self._parts(facts)))
            except FactError as error:
                unread.append(str(error))
        if unread:
            more = [f"And {len(unread) - _NAMED:,} more."] if len(unread) > _NAMED else []
            raise FactError("Left out: " + " ".join([*unread[:_NAMED], *more]))

    def ask(
        self, question: str, k: int = 1, *, composer: str = "exact"
    ) -> tuple[dict[Way, dict[str, Any]], Explanation]:
        """A question with the `k` documents that say most about it: the arguments of `Session.stream` for each way, and
        the plan for packs.

        Raises `FactError` for a blank question or without documents, and the errors of `Session.explain`.
        """
        documents = self.search(question, k)

        def request(parts: list[str], options: dict[str, Any]) -> dict[str, Any]:
            content = "\n".join(parts) + f"\n\n{_INSTRUCTION}\nQuestion: {question.strip()}"
            return {"messages": [{"role": "user", "content": content}], "max_tokens": 64} | options

        handles = [str(document.handle) for document in documents]
        packs = request(handles, {"view": self._view, "composer": composer})
        text = request([document.text for document in documents], {"reuse": False})
        return {"packs": packs, "text": text}, self.session.explain(**packs)

    def search(self, question: str, k: int) -> list[Document]:
        """The `k` documents with the paragraphs nearest to `question`, best first."""
        if not self.documents:
            raise FactError("There are no documents yet; add one first.")
        return [self.documents[found.unit.source] for found in self._delivery.search(question, k)]

    def _compile(self, file: str, parts: list[list[Fact]]) -> Iterator[Document]:
        """Make the packs of a file's parts, in place of those of an earlier version."""
        for outdated in [document.name for document in self.documents.values() if document.file == file]:
            self._delivery.delete(source=outdated)
            del self.documents[outdated]
        for number, paragraphs in enumerate(parts, 1):
            name = f"{file}, part {number}" if len(parts) > 1 else file
            facts = [
                replace(fact, id=f"{name}#{place}", source=name, namespace=_NAMESPACE, expires=None)
                for place, fact in enumerate(paragraphs)
            ]
            self._delivery.facts.add(facts, overwrite=True)
            [found] = self._delivery.deliver([Hit(facts[0], 1.0)])
            if found.handle is None:
                raise FactError(f"{name}: holds too little text for a pack; expected at least a sentence.")
            if self.address:  # A server compiles on first use.
                self.session.generate(str(found.handle), view=self._view, max_tokens=1)
            pack = self.store.peek(found.handle, PackKey(self.session.fingerprint))
            tokens, kv_bytes = (len(pack.token_ids), pack.stored_bytes) if pack else (0, 0)
            document = Document(name, file, found.unit.text, found.handle, tokens, kv_bytes)
            self.documents[name] = document
            yield document

    def _read(self, file: Path) -> Iterator[Fact]:
        fact = None
        try:
            for fact in read_facts(file, max_chars=_PARAGRAPH):
                yield fact
        except FactError as error:
            # Do not show where an upload lies on this machine, nor an option that the page has not.
            said = str(error.__cause__ or error).replace(str(file), file.name)
            raise FactError(f"{said.rstrip('.')}.") from error
        if fact is None:
            raise FactError(f"{file.name}: holds no text; expected at least a sentence.")

    def _parts(self, facts: Iterable[Fact]) -> Iterator[list[Fact]]:
        """Divide the paragraphs of a file into parts that fit one pack; titles become text."""
        max_tokens = min(_PART_TOKENS, self.session.max_positions // 4)
        part, tokens, title = list[Fact](), 0, ""
        for fact in facts:
            text = fact.text if fact.title in ("", title) else f"{fact.title}\n{fact.text}"
            count = len(self.session.tokenizer.encode(text, add_special_tokens=False))
            if part and tokens + count > max_tokens:
                yield part
                part, tokens = [], 0
            part.append(replace(fact, text=text))
            tokens, title = tokens + count, fact.title
        if part:
            yield part
