"""What benchmarks of a server share: a session on it, passages to ask about, restarts."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from benchmarks import common
from benchmarks.vllmserver import KpServer
from kp_core import Generation, load_engine

__all__ = ["ASKED", "Desk", "passages", "restarted"]

ASKED = "Say in one sentence what this is about."


class Desk:
    """One namespace of a server: a session on it, and packs in its store."""

    def __init__(self, server: KpServer, namespace: str) -> None:
        self.server, self.namespace = server, namespace
        self.session = load_engine(engine=server.url, api_key=server.keys[namespace])

    def handle(self, text: str) -> str:
        """The handle of a pack that the server compiles at its first use."""
        pack = self.session.build_pack(text, namespace=self.namespace, lazy=True)
        return str(self.server.store.put(pack))

    def ask(self, content: str, tokens: int, **options: Any) -> Generation:  # noqa: ANN401
        """An answer of `tokens` tokens at most."""
        view = self.server.store.view(self.namespace)
        return self.session.generate(content, view=view, max_tokens=tokens, **options)


def passages(desk: Desk, arguments: argparse.Namespace, size: int, count: int) -> list[str]:
    """`count` passages of about `size` tokens, each cut out of the next texts of the data."""
    texts = itertools.cycle(str(each.text) for each in common.read_passages(arguments.data, arguments.limit))
    tokenizer, found = desk.session.tokenizer, []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < size:
            ids += tokenizer.encode(next(texts) + " ", add_special_tokens=False)
        found.append(tokenizer.decode(ids[:size]).strip())
    return found


def restarted(server: KpServer) -> None:
    """Stop and start it."""
    server.stop()
    server.start()
    Desk(server, "text").ask("Hello.", 1)  # Kernels are set up.
