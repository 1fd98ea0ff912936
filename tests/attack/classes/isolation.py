"""Threads that ask at once, each with a view of its own: nobody gets another's answer, pack or text.

Answers are `deterministic`, so each is bit for bit what it is alone; some are given up in the middle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from kp_core import Generation, KnowledgePackError, PackStore
from kp_core.errors import PackNotFoundError
from tests.attack.harness import Case, LostError, WrongError
from tests.conftest import tiny_engine
from tests.core.packs.made import make_pack, same

SHORT = 12

_SPACES = ("geo", "hr", "a")
_THREADS = 6


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    engine, store, raced = tiny_engine(chunk_tokens=64), PackStore(folder / "packs"), PackStore(folder / "raced")
    texts = {
        space: [f"The {space} keeper {number} counts ships and writes them down." for number in range(3)]
        for space in _SPACES
    }
    handles = {
        space: [str(store.put(engine.build_pack(each, namespace=space))) for each in mine] for space, mine in texts.items()
    }  # fmt: skip
    alone: dict[tuple[Any, ...], Generation] = {}

    def ask(space: str, said: str, options: dict[str, Any], cancel: threading.Event | None = None) -> Generation:
        return engine.generate(said, view=store.view(space), deterministic=True, cancel=cancel, **options)

    def asked(draw: Random) -> tuple[str, str, dict[str, Any]]:
        space, bank = draw.choice(_SPACES), [each for mine in handles.values() for each in mine]
        said = "\n".join([*draw.sample(bank, draw.randrange(1, 4)), f"Who is {draw.randrange(3)}?"])
        options: dict[str, Any] = {"max_tokens": draw.randrange(1, 9), "placement": draw.choice(("in_place", "system"))}
        if draw.random() < 0.3:
            options |= {"temperature": 0.9, "seed": draw.randrange(3)}
        return space, said, options

    def answers(draw: Random) -> int:
        requests = [asked(draw) for _ in range(_THREADS)]
        given_up = [draw.random() < 0.3 for _ in requests]
        keys = [(space, said, *sorted(options.items())) for space, said, options in requests]
        for key, request in zip(keys, requests, strict=True):
            if key not in alone:
                alone[key] = ask(*request[:2], {**request[2], "reuse": False})
        if draw.random() < 0.3:
            engine.clear_cache()

        def one(at: int) -> Generation | None:
            cancel = threading.Event()
            timer = threading.Timer(0.02, cancel.set) if given_up[at] else None
            if timer:
                timer.start()
            try:
                return ask(*requests[at], cancel)
            except KnowledgePackError:
                if not given_up[at]:
                    raise
                return None
            finally:
                if timer:
                    timer.cancel()

        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(one, range(_THREADS)))
        for (space, said, _), key, given, each in zip(requests, keys, given_up, found, strict=True):
            expected = alone[key]
            if each is None or (given and each.token_ids == expected.token_ids[: len(each.token_ids)]):
                continue
            if each.token_ids != expected.token_ids or each.usage.pack_tokens != expected.usage.pack_tokens:
                raise WrongError(f"{space} asked {said!r}: {each.text!r} of {each.usage}, alone {expected.text!r}")
        return _THREADS

    def foreign(draw: Random) -> None:
        """What a view may not read is the handle's own letters in the prompt, and no text of the pack."""
        space, said, options = asked(draw)
        rendered = engine.template.text(engine.template.render(said, view=store.view(space)))
        for other, mine in handles.items():
            for handle, each in zip(mine, texts[other], strict=True):
                if handle in said and (each in rendered) != (other == space):
                    raise WrongError(f"a view of {space} and a pack of {other}: {rendered!r}")
        usage = ask(space, said, options).usage
        if (usage.pack_tokens > 0) != any(handle in said for handle in handles[space]):
            raise WrongError(f"{space} was given {usage.pack_tokens} tokens of packs for {said!r}")

    def races(draw: Random) -> int:
        """Threads that put, get and remove the same packs: a pack is whole and its own, or there is none."""
        packs = [make_pack(f"Pack {number}.", seed=number, tokens=60) for number in range(3)]
        names = [raced.handle(pack.text, pack.namespace) for pack in packs]
        plans = [
            [
                (draw.choice(("put", "put", "get", "get", "peek", "remove", "list")), draw.randrange(3))
                for _ in range(12)
            ]
            for _ in range(4)
        ]

        def work(plan: list[tuple[str, int]]) -> None:
            for act, which in plan:
                try:
                    if act == "put":
                        raced.put(packs[which])
                    elif act == "remove":
                        raced.remove(names[which])
                    elif act == "list":
                        list(raced.entries(names[which]))
                    else:
                        found = raced.get(names[which]) if act == "get" else raced.peek(names[which])
                        if found is not None and found.text != packs[which].text:
                            raise WrongError(f"{names[which]} gave {found.text!r}")
                        if act == "get" and found.kv is not None and not same(found, packs[which]):
                            raise WrongError(f"{names[which]} gave torn KV")
                except PackNotFoundError:
                    pass

        with ThreadPoolExecutor(len(plans)) as pool:
            list(pool.map(work, plans))
        for pack in packs:
            if not same(raced.get(raced.put(pack)), pack):
                raise LostError("what was put at last is not there")
        return sum(map(len, plans))

    def case(draw: Random) -> int | None:
        return draw.choice((answers, answers, foreign, races))(draw)

    yield case
