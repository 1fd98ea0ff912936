"""What a server did with packs and facts, beside what vLLM counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from kp_core.packs.handle import Handle, find_handles
from kp_serve.wire import Visit, call_raw

__all__ = ["FIRST_PACK", "Counts", "HotPacks"]

FIRST_PACK = "kp-pack"
"""The header in which a client names the first pack of a prompt of token ids; a balancer may go by it, too."""

_HOT = 4096

_ABOUT = {
    "packs_delivered": "Packs that handles in chat messages brought",
    "pack_tokens": "Tokens of these packs",
    "handles_left": "Handles in chat messages that brought nothing and stayed text",
    "packs_compiled": "Texts that were compiled",
    "facts_added": "Facts that were stored",
    "fact_searches": "Searches for facts",
    "requests_refused": "Requests that were answered with an error of ours",
}


class Counts:
    """Counters since the start of this process; all tenants in one, as whoever has a key may read them."""

    def __init__(self) -> None:
        self._found = Counter[str]()

    def add(self, **amounts: int) -> None:
        """Count; names are those of `_ABOUT`. To be called in the thread of the event loop."""
        for name, amount in amounts.items():
            if name not in _ABOUT:
                raise KeyError(name)
            self._found[name] += amount

    def __str__(self) -> str:
        """As Prometheus reads it."""
        lines = [
            f"# HELP kp_{name}_total {about}.\n# TYPE kp_{name}_total counter\nkp_{name}_total {self._found[name]}\n"
            for name, about in _ABOUT.items()
        ]
        return "".join(lines)

    async def join(self, visit: Visit) -> None:
        """Answer `/metrics` with vLLM's figures, and these behind them."""
        # Neither zipped nor in the other format, which has an end of its own.
        plain = [pair for pair in visit.scope["headers"] if pair[0].lower() not in (b"accept", b"accept-encoding")]
        status, headers, data = await call_raw(visit.app, {**visit.scope, "headers": plain}, visit.receive)
        if status == 200:
            data = data + (b"" if data.endswith(b"\n") or not data else b"\n") + str(self).encode()
        kept: list[Any] = [pair for pair in headers if pair[0].lower() != b"content-length"]
        kept.append((b"content-length", str(len(data)).encode()))
        await visit.send({"type": "http.response.start", "status": status, "headers": kept})
        await visit.send({"type": "http.response.body", "body": data})


class HotPacks:
    """The packs that this server answered from last: it has their KV at hand, as long as vLLM's cache lasts."""

    def __init__(self) -> None:
        self._found: dict[Handle, None] = {}

    def note(self, named: str, namespaces: Collection[str]) -> None:
        """What is named there, of these namespaces, was answered from. To be called in the thread of the event loop."""
        for _, _, handle in find_handles(named):
            if handle.namespace in namespaces:
                self._found.pop(handle, None)
                self._found[handle] = None
        while len(self._found) > _HOT:
            del self._found[next(iter(self._found))]

    def among(self, namespaces: Collection[str]) -> list[Handle]:
        """Those of these namespaces, the latest first."""
        return [handle for handle in reversed(self._found) if handle.namespace in namespaces]
