"""Counters of packs and facts, added to vLLM's metrics, and the packs that a server used last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from kp_core.packs.handle import Handle, find_handles
from kp_serve.wire import Visit, call_raw

__all__ = ["FIRST_PACK", "Counts", "HotPacks"]

FIRST_PACK = "kp-pack"
"""Request header: the first pack in a prompt of token ids. A load balancer may route by it."""

_HOT = 4096

_ABOUT = {
    "packs_delivered": "Packs that handles in chat messages brought",
    "pack_tokens": "Tokens of these packs",
    "handles_left": "Handles in chat messages that brought nothing",
    "packs_compiled": "Texts that were compiled",
    "facts_added": "Facts that were stored",
    "fact_searches": "Searches for facts",
    "requests_refused": "Requests that were answered with an error of ours",
}


class Counts:
    """Counters since this process started, summed over all tenants, as every key may read them."""

    def __init__(self) -> None:
        self._found = Counter[str]()

    def add(self, **amounts: int) -> None:
        """Add to counters by their names in `_ABOUT`. Call it in the event loop's thread. Raises `KeyError`."""
        for name, amount in amounts.items():
            if name not in _ABOUT:
                raise KeyError(name)
            self._found[name] += amount

    def __str__(self) -> str:
        """The counters in Prometheus' text format."""
        lines = [
            f"# HELP kp_{name}_total {text}.\n# TYPE kp_{name}_total counter\nkp_{name}_total {self._found[name]}\n"
            for name, text in _ABOUT.items()
        ]
        return "".join(lines)

    async def join(self, visit: Visit) -> None:
        """Answer `/metrics` with vLLM's metrics, followed by these counters."""
        # Request plain text: uncompressed, and not OpenMetrics, which has an end marker.
        request_headers = [
            pair for pair in visit.scope["headers"] if pair[0].lower() not in (b"accept", b"accept-encoding")
        ]
        status, headers, data = await call_raw(visit.app, {**visit.scope, "headers": request_headers}, visit.receive)
        if status == 200:
            data = data + (b"" if data.endswith(b"\n") or not data else b"\n") + str(self).encode()
        response_headers: list[Any] = [pair for pair in headers if pair[0].lower() != b"content-length"]
        response_headers.append((b"content-length", str(len(data)).encode()))
        await visit.send({"type": "http.response.start", "status": status, "headers": response_headers})
        await visit.send({"type": "http.response.body", "body": data})


class HotPacks:
    """The packs that this server used last. Their KV is in vLLM's cache until vLLM evicts it."""

    def __init__(self) -> None:
        self._found: dict[Handle, None] = {}

    def note(self, named: str, namespaces: Collection[str]) -> None:
        """Mark the handles in `named` of these namespaces as just used. Call it in the event loop's thread."""
        for _, _, handle in find_handles(named):
            if handle.namespace in namespaces:
                self._found.pop(handle, None)
                self._found[handle] = None
        while len(self._found) > _HOT:
            del self._found[next(iter(self._found))]

    def among(self, namespaces: Collection[str]) -> list[Handle]:
        """The packs of these namespaces, latest first."""
        return [handle for handle in reversed(self._found) if handle.namespace in namespaces]
