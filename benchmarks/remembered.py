"""Answers kept in a file, so that a run that was interrupted goes on and sections share what they asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks import common
from kp_core import Message, Session, Steering
from kp_core.steering import Scope, as_steering

__all__ = ["Remembered", "Said"]


@dataclass(frozen=True)
class Said:
    """An answer."""

    text: str


class Remembered:
    """An engine whose greedy answers and perplexities are looked up before they are computed.

    `path` is a JSON-lines file; without it nothing outlasts the process. The key is all that an answer depends on:
    model, messages, packs, steering, scope and length.
    """

    def __init__(self, engine: Session, path: Path | None = None) -> None:
        self._engine, self._path = engine, path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self._known[row["key"]] = row["value"]

    def generate(self, messages: Any, **request: Any) -> Said:  # noqa: ANN401 - as the engine's
        """As the engine's, the text alone."""
        key = self._key("generate", messages, request)
        if key not in self._known:
            self._keep(key, self._engine.generate(messages, **request).text)
        return Said(self._known[key])

    def ahead(
        self,
        asked: Sequence[list[Message]],
        steerings: Sequence[Steering | None],
        scope: Scope | None,
        max_tokens: int,
    ) -> None:
        """Compute at a time what `generate` will be asked."""
        requests = {}
        for steering, messages in itertools.product(steerings, asked):
            options = {"steering": steering, "scope": scope, "max_tokens": max_tokens}
            requests[self._key("generate", messages, options)] = {"messages": messages, **options}
        for key, answer in self._engine.generate_many(requests, done=self._known):
            self._keep(key, answer.text)

    def perplexity(self, messages: Any, answer: str, **request: Any) -> float:  # noqa: ANN401 - as the engine's
        """As the engine's."""
        key = self._key("perplexity", [messages, answer], request)
        if key not in self._known:
            self._keep(key, common.perplexity(self._engine, messages, answer, **request))
        return float(self._known[key])

    def _key(self, what: str, asked: object, request: dict[str, Any]) -> str:
        packs = request.get("packs") or ()
        steering = as_steering(request.get("steering"), with_knowledge=bool(packs))
        # One that changes nothing is none.
        applied = None if steering is None else [steering.id, request.get("scope")]
        texts = [pack.text for pack in packs]
        parts = [self._engine.fingerprint.id, what, asked, texts, applied, request.get("max_tokens")]
        return blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def _keep(self, key: str, value: object) -> None:
        self._known[key] = value
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": key, "value": value}) + "\n")
