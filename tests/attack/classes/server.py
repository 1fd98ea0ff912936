"""What clients send to `kp serve`: hostile bodies, headers, paths, handles and facts, in the middleware before an
application that says again all that it was given. Whatever is wrong is an error in the API's shape; no answer holds a
word of another tenant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from kp_core import find_handles
from kp_core.packs.handle import Handle
from tests.attack.harness import Case, WrongError
from tests.attack.mutate import as_json, damaged, text, value, warped
from tests.serve.gate import Served, events_of

SHORT = 150

_MINE, _OTHERS = "The heron of Vint is grey.", "WHAT ONLY B KNOWS"
_HAS = (
    *[("POST", "/v1/chat/completions")] * 4,
    *[("POST", "/v1/facts/search")] * 2,
    *(("POST", path) for path in ("/v1/completions", "/v1/packs", "/v1/facts")),
    *(("GET", path) for path in ("/v1/packs", "/v1/packs/", "/v1/facts", "/v1/facts/", "/metrics", "/v1/models")),
    *(("DELETE", path) for path in ("/v1/packs/", "/v1/facts/")),
)
_LACKS = (
    *(("POST", path) for path in ("/v1/responses", "/tokenize", "/v1/packs/", "/v1/facts/", "/v1/chat/completions/")),
    *(("PUT", path) for path in ("/v1/packs", "/v1/facts/")),
    *(("GET", path) for path in ("/v1/packs/../", "/v1/facts/../packs/", "/v1/chat/completions", "/docs")),
    ("DELETE", "/v1/packs"),
    ("OPTIONS", "/v1/facts"),
)
_SALTS = ("", "x" * 200, "a/b\\c@", None, 3)
_KINDS = {400, 401, 403, 404, 405, 413}


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    server = Served(folder)
    [mine], [other] = server.add(_MINE)["data"], server.add(_OTHERS, key="b")["data"]
    names = (mine["handle"], other["handle"], mine["id"], other["id"], "kp:b/" + "a" * 21, "kp:a/" + "a" * 21)

    def said(draw: Random) -> str:
        return draw.choice(names) if draw.random() < 0.6 else text(draw, names)

    def body_for(draw: Random, path: str) -> Any:
        if "facts" in path:
            return draw.choice(
                (
                    {"facts": [{"text": said(draw)}], "namespace": draw.choice("ab")},
                    {
                        "question": said(draw),
                        "k": draw.choice((1, 9)),
                        "namespace": draw.choice(("a", "b", ["a", "b"])),
                    },
                )
            )
        if "packs" in path:
            return {"text": said(draw), "namespace": draw.choice("ab"), "compiled_for": draw.choice(("user", "system"))}
        role = draw.choice(("user", "system", "developer", "tool", "assistant", "root"))
        part = draw.choice((said(draw), [{"type": "text", "text": said(draw)}]))
        return {
            "messages": [{"role": role, "content": part}],
            "cache_salt": draw.choice(_SALTS),
            "stream": draw.random() < 0.3,
        }

    def case(draw: Random) -> None:
        server.says = draw.choice((mine["handle"], text(draw, names)))
        method, path = draw.choice(_HAS if draw.random() < 0.8 else _LACKS)
        if path.endswith("/"):
            path += quote(said(draw).encode(errors="replace"), safe="/:")
        if draw.random() < 0.3:
            limit = quote(str(draw.choice((1, 9, "x", -1, 10**30))))
            path += f"?namespace={draw.choice('ab')}&limit={limit}&after={draw.choice(names)}"
        body = body_for(draw, path)
        if draw.random() < 0.4:
            body = warped(draw, body, (*names, value(draw)))
        data = (as_json(body) or "{}").encode(errors="surrogatepass")
        if draw.random() < 0.1:
            data = damaged(draw, data)
        headers = {
            "authorization": draw.choice((f"Bearer {server.keys['b'][:-1]}", "Bearer ", "Basic x", "bearer\x80", "")),
            "content-encoding": draw.choice(("gzip", "identity")),
            "accept": draw.choice(("*/*", "text/event-stream", "application/openmetrics-text")),
        }
        key = draw.choice((*"aaaaaaa", "reader", None))
        if key:
            headers.pop("authorization")
        seen = len(server.seen)
        done = server.ask(
            method, path, data, key, headers={name: each.encode("latin-1") for name, each in headers.items()}
        )
        _judge(done, server, seen)
        gone = method == "DELETE" and done.status_code == 200
        theirs = [fact.id for fact in server.gate.state.facts.facts(namespace="b")]
        if theirs != [other["id"]] or [*map(str, server.store.handles("b"))] != [other["handle"]]:
            raise WrongError(f"{method} {path} changed what is another's")
        if gone:
            server.add(_MINE)

    def _judge(done: Any, server: Served, seen: int) -> None:
        told = done.content + json.dumps(server.seen[seen:]).encode()
        if _OTHERS.encode() in told:
            raise WrongError(f"{done.request.method} {done.request.url} told of another: {done.text[:200]}")
        if done.status_code == 200:
            if "event-stream" in done.headers.get("content-type", ""):
                answers = [choice["delta"] for event in events_of(done.content) for choice in event["choices"]]
            else:
                found = done.json() if done.headers.get("content-type") == "application/json" else {}
                answers = [each.get("message", each) for each in found.get("choices", ())]
                for each in found.get("data", ()) if found.get("object") == "list" else ():
                    if (each["namespace"] if isinstance(each, dict) else Handle.parse(each).namespace) != "a":
                        raise WrongError(f"{done.request.url} lists what is another's: {each}")
            if find_handles("".join(each.get("content") or each.get("text") or "" for each in answers)):
                raise WrongError(f"the model said a handle: {done.text[:200]}")
            return
        error = done.json().get("error", {})
        if done.status_code not in _KINDS or not error.get("message") or not error.get("type"):
            raise WrongError(f"{done.request.method} {done.request.url} {done.status_code}: {done.text[:200]}")

    yield case
