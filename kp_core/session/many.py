"""Many conversations, answered several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from kp_core.errors import OptionError
from kp_core.progress import bar_of
from kp_core.prompt.conversation import Message
from kp_core.session.reading import Generation

Asked = Sequence[Message] | str | Mapping[str, Any]
"""A conversation, or a mapping of its `messages` and its own options."""
Key = TypeVar("Key", bound=Hashable)


def answer_many(  # noqa: PLR0913 - as `Session.generate_many`
    generate: Callable[..., Generation],
    requests: Mapping[Key, Asked] | Iterable[tuple[Key, Asked]],
    options: Mapping[str, Any],
    *,
    at_once: int,
    done: Container[Key],
    progress: bool,
) -> Iterator[tuple[Key, Generation]]:
    """See `Session.generate_many`. Raises `OptionError` at the call."""
    if at_once < 1:
        raise OptionError(f"Got at_once={at_once}; expected at least 1.")
    if "cancel" in options:
        raise OptionError("Got cancel=; leave the loop to stop, which ends what is under way.")
    pairs = list(requests.items() if isinstance(requests, Mapping) else requests)
    if incomplete := [key for key, request in pairs if isinstance(request, Mapping) and "messages" not in request]:
        expected = "expected a conversation, or a mapping of `messages` and options"
        raise OptionError(f"The request {incomplete[0]!r} has no messages; {expected}.")
    # A request reuses the KV of earlier ones with the same beginning, and they are decoded over the same keys.
    todo = sorted((pair for pair in pairs if pair[0] not in done), key=lambda pair: _beginning(pair[1]))

    def answers() -> Iterator[tuple[Key, Generation]]:
        cancel, remaining = threading.Event(), iter(todo)
        running: dict[Future[Generation], Key] = {}
        bar = bar_of("Answering", len(todo), "answer", shown=progress)
        with bar, ThreadPoolExecutor(at_once, "kp-many") as pool:
            try:
                while True:
                    for key, request in remaining:
                        request_options = request if isinstance(request, Mapping) else {"messages": request}
                        running[pool.submit(generate, **{**options, **request_options, "cancel": cancel})] = key
                        if len(running) >= at_once:
                            break
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        key = running.pop(future)
                        bar.update()
                        yield key, future.result()
            finally:
                cancel.set()  # A caller that leaves the loop early, or gets an error, waits for one step at most.

    return answers()


def _beginning(asked: Asked) -> str:
    """The sort key of a request: its packs by name, then the conversation from its first word on."""
    if isinstance(asked, Mapping):
        return "".join(
            f"{pack}\n" for pack in (getattr(pack, "text", pack) for pack in asked.get("packs") or ())
        ) + _beginning(asked["messages"])
    if isinstance(asked, str):
        return asked
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in asked)
