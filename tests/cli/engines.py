"""What tests name with `--engine`."""

from __future__ import annotations

from typing import Any, ClassVar

from kp_core import Plan, Session, TokenStream
from tests.conftest import tiny_engine


def tiny(model: str | None = None) -> Session:
    """A model of random weights, of the architecture `model`."""
    return tiny_engine(model) if model else tiny_engine()


def own(model: str | None = None) -> Session:
    """The same for a command that closes its session."""
    return tiny_engine.__wrapped__(model or "llama")


def interrupted(model: str | None = None) -> Session:
    """Ctrl-C while a model loads."""
    raise KeyboardInterrupt


class Bare:
    """The members of the seam and not one capability: the same short answer to everything."""

    supports = frozenset[str]()
    lacks: ClassVar[dict[str, str]] = {}
    max_positions = 2048

    def __init__(self) -> None:
        self.identity, self.tokenizer = tiny().fingerprint, tiny().tokenizer

    def run(self, plan: Plan) -> TokenStream:
        def tokens(stream: TokenStream) -> Any:
            stream.computed_tokens = len(plan.prompt)
            yield from self.tokenizer.encode("a heron")
            stream.finish = "stop"

        return TokenStream(tokens)

    def kv(self, plans: Any) -> Any:
        raise NotImplementedError


def bare(model: str | None = None) -> Bare:
    """An engine that is no session yet."""
    return Bare()


def number(model: str | None = None) -> int:
    """No engine at all."""
    return 7
