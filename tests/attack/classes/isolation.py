"""Threads that ask at once, each with a view of its own: nobody gets another's answer, pack or text.

Each answer is bit for bit what it is alone; some are given up in the middle. Nor does anybody learn of a pack by guessing
its text: what the engine says of a guess does not depend on the text, unless the view may read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from kp_core import Generation, KnowledgePack, KnowledgePackError, PackStore, PackView, Session
from kp_core.errors import PackNotFoundError
from kp_methods.edit import amend
from tests.attack.harness import Case, LostError, WrongError
from tests.composers import Firsts
from tests.conftest import tiny_engine
from tests.core.packs.made import make_pack, same
from tests.kits import CHATML, NaiveComposer

SHORT = 6

_SPACES = ("geo", "hr", "a")
_THREADS = 6
_GUESSED = "The {} keeper counts the ships at dawn, writes them down and hangs a lantern over the quay."
_OTHER = "Four sails has the mill of {}, and from dawn on it grinds barley and rye for the bakers of the isles."
_WHO = {"role": "user", "content": "Who?"}


def _engine() -> Session:
    """One whose template writes results of tools as JSON, in which no pack is found."""
    said = "message['content']"
    template = CHATML.replace(f"{said} +", f"({said} | tojson if message['role'] == 'tool' else {said}) +")
    return tiny_engine(chunk_tokens=64, template=template)


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    engine, store, raced = _engine(), PackStore(folder / "packs"), PackStore(folder / "raced")
    steering = engine.make_steering([("an 7 er", "er 42")], progress=False)
    texts = {
        space: [f"The {space} keeper {number} counts ships and writes them down." for number in range(3)]
        for space in _SPACES
    }
    handles = {
        space: [str(store.put(engine.build_pack(each, namespace=space))) for each in mine] for space, mine in texts.items()
    }  # fmt: skip
    alone: dict[tuple[Any, ...], Generation] = {}

    def ask(space: str, said: str, options: dict[str, Any], cancel: threading.Event | None = None) -> Generation:
        return engine.generate(said, view=store.view(space), cancel=cancel, **options)

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

    def guesses(draw: Random) -> int:
        """Others guess a pack, token by token: what is reused is the same whether it holds that text or another."""
        space = draw.choice(_SPACES)
        ask, sent = draw.choice(askings(space, draw))
        text, other = (each.format(space) for each in (_GUESSED, _OTHER))
        lengths = [*sorted(draw.sample(range(1, len(text)), 9)), len(text)]
        guessed = [sent(text[:length] + draw.choice(("", "?", "\n\nWho"))) for length in lengths]

        def reused(secret: str, view: PackView | None) -> list[int]:
            pack = engine.build_pack(secret, namespace=space)
            engine.clear_cache()
            ask(pack)
            return [engine.prefill(each, view=view, keep="never").usage.reused_tokens for each in guessed]

        view = draw.choice((None, store.view(*(each for each in _SPACES if each != space))))
        right, wrong = reused(text, view), reused(other, view)
        if right != wrong:
            raise WrongError(f"{ask.__name__}: {guessed} tell a pack of {space}: {right} tokens reused, else {wrong}")
        if sum(reused(text, store.view(space))) <= sum(wrong):
            raise WrongError(f"{ask.__name__}: a view of {space} reuses nothing of its pack for {guessed}")
        return 3 * len(guessed)

    def askings(space: str, draw: Random) -> list[tuple[Callable[[KnowledgePack], object], Callable[[str], Any]]]:
        """Ways to ask about a pack of `space`, and what others send who guess so much of its text."""
        first, before = handles[space][0], draw.choice(("", "Of old: ", "Of old.", "Of old:\n"))
        behind, squash_above, is_talk = draw.choice((f"\n\n{first}", "")), draw.choice((0.0, 9.0)), draw.random() < 0.5
        composer, scope = (
            draw.choice(("exact", "splice", NaiveComposer(), Firsts(0.5))),
            draw.choice(("pack", "prompt")),
        )
        options = {"view": store.view(space), "max_tokens": 3, "keep": draw.choice(("used_twice", "always", "never"))}

        def in_place(pack: KnowledgePack) -> None:
            engine.generate(f"{before}{store.put(pack)}{behind}\n\nWho?", **options)

        def second(pack: KnowledgePack) -> None:
            said = f"{first}\n\n{store.put(pack)}\n\nWho?"
            engine.generate(said, composer=composer, **options)
            engine.when_idle(lambda: None).result(60)

        def as_memory(pack: KnowledgePack) -> None:
            engine.generate("Who?", packs=[pack], **options)

        def steered(pack: KnowledgePack) -> None:
            engine.generate(f"{store.put(pack)} Who?", steering=steering, scope=scope, **options)

        def edited(pack: KnowledgePack) -> None:
            made = amend(pack, "dawn", "noon", engine, squash_above=squash_above)
            talk = [{"role": "user", "content": str(store.put(pack))}, {"role": "assistant", "content": "No."}]
            asked = {"role": "user", "content": f"{store.put(made)} Who?"}
            engine.generate([*talk, asked] if is_talk else [asked], **options)

        def as_json(pack: KnowledgePack) -> None:
            engine.generate([_WHO, {"role": "tool", "content": str(store.put(pack))}], **options)

        return [
            (in_place, lambda guess: f"{before}{guess}"),
            (second, lambda guess: f"{texts[space][0]}\n\n{guess}"),
            (as_memory, lambda guess: [{"role": "system", "content": guess}, _WHO]),
            (steered, lambda guess: guess),
            (edited, lambda guess: guess),
            (as_json, lambda guess: [_WHO, {"role": "tool", "content": guess}]),
        ]

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
        return draw.choice((answers, answers, foreign, guesses, guesses, races))(draw)

    yield case
