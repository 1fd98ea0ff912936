"""Handles: forged, bent, of others, nested, in every role. What resolves is what a reading by hand says."""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from kp_core import PackStore, find_handles, strip_handles
from kp_core.errors import PromptError
from kp_core.packs.handle import Handle
from tests.attack.harness import Case, WrongError, refused
from tests.attack.mutate import text, value
from tests.core.packs.made import make_pack

SHORT = 375

_WORD = set(string.ascii_letters + string.digits + "_")
_SPACE = set(string.ascii_lowercase + string.digits + "_-")
_ID = set(string.ascii_lowercase + "234567")
_ROLES = ("system", "user", "tool", "assistant", "developer", "", "SYSTEM")
_SECRETS = ("One secret.", "Two <|im_end|> secrets.", "Three.")


def _shape(said: str, at: int) -> int:
    """Where what has the shape of a handle at `at` ends, whatever stands around it; 0 if nothing has."""
    slash = at + 3
    while slash < len(said) and said[slash] in _SPACE:
        slash += 1
    stop = slash + 22
    is_one = said.startswith("kp:", at) and 1 <= slash - at - 3 <= 64 and said[slash : slash + 1] == "/"
    return stop if is_one and len(said) >= stop and set(said[slash + 1 : stop]) <= _ID else 0


def by_hand(said: str) -> list[tuple[int, int]]:
    """Where handles stand, read letter by letter: the oracle of the pattern."""
    found, at = [], 0
    while (at := said.find("kp:", at)) >= 0:
        stop = _shape(said, at)
        free = at == 0 or said[at - 1] not in _WORD or (at > 1 and said[at - 2] == "\\" and said[at - 1] in "nrt")
        behind_id = at > 21 and said[at - 22] == "/" and set(said[at - 21 : at]) <= _ID
        ends = stop == len(said) or said[stop : stop + 1] not in _WORD or _shape(said, stop)
        if stop and ends and (free or behind_id):
            found.append((at, stop))
            at = stop
        else:
            at += 1
    return found


def _bent(draw: Random, handle: str) -> str:
    at = draw.randrange(len(handle))
    return draw.choice(
        (
            handle, handle, handle[:at] + draw.choice("abz279-_/:. kpK\u212a") + handle[at + 1 :], handle[:at] + handle[at + 1 :],
            handle[:at] + "\u200b" + handle[at:], handle.upper(), handle + draw.choice("a7_/.-\n"), draw.choice("a_n\\\n.:-(") + handle,
            "\\n" + handle, f"kp:{'a' * draw.choice((1, 64, 65))}/{handle[-21:]}", handle[:at] + handle + handle[at:],
            handle.replace("kp:", "kp:-"), f"kp:x-{handle}-y/{handle[-21:]}", handle.replace("/", "//"), f"[{handle}]({handle})",
        )
    )  # fmt: skip


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    store, other = PackStore(folder / "mine"), PackStore(folder / "other")
    handles = {str(store.put(make_pack(secret, space))): secret for secret in _SECRETS for space in ("geo", "hr", "a")}
    foreign = [str(other.put(make_pack(secret, "geo"))) for secret in _SECRETS]

    def resolving(draw: Random) -> None:
        pieces = [_bent(draw, draw.choice([*handles, *foreign])) for _ in range(draw.randrange(1, 4))]
        said = draw.choice(("", " ", "\n", "\\n", "-")).join((*pieces, text(draw)))
        spans = [(match[0], match[1]) for match in find_handles(said)]
        if spans != by_hand(said):
            raise WrongError(f"handles of {said!r}: {spans}, by hand {by_hand(said)}")
        spaces = draw.sample(("geo", "hr", "a", "b"), draw.randrange(4))
        trusted = draw.choice((("system", "user", "tool"), ("tool",), ()))
        role = draw.choice(_ROLES)
        segments = store.view(*spaces, trusted_roles=trusted).split(said, role)
        may = role in trusted
        expected = [
            said[a:b]
            for a, b in spans
            if may and said[a:b] in handles and said[a:b].split(":")[1].split("/")[0] in spaces
        ]
        brought = [each for each in segments if not isinstance(each, str)]
        if [each.handle for each in brought] != expected:
            raise WrongError(f"{role} of {spaces}, {trusted}: {said!r} brought {brought}, expected {expected}")
        if any(each.text != handles[each.handle] for each in brought):
            raise WrongError("a handle brought the text of another")
        if "".join(each if isinstance(each, str) else each.handle for each in segments) != said:
            raise WrongError("text around handles was changed")
        if find_handles(strip_handles(said)):
            raise WrongError(f"stripping {said!r} leaves a handle")

    def parsing(draw: Random) -> None:
        given = draw.choice((text(draw), _bent(draw, draw.choice(list(handles))), value(draw)))
        with refused(*(() if isinstance(given, str) else (TypeError,))):
            if str(Handle.parse(given)) != given:
                raise WrongError(f"{given!r} was read as another handle")
        with refused():
            store.handle(text(draw), given)
            if not isinstance(given, str) or not set(given) <= _SPACE or not 1 <= len(given) <= 64:
                raise WrongError(f"{given!r} names a namespace")

    def forging(draw: Random) -> None:
        """Whoever knows the text, but not the secret, makes another handle."""
        forged = other.handle(draw.choice(_SECRETS), "geo")
        if forged in store or store.view("geo").split(str(forged), "user") != (str(forged),):
            raise WrongError("a handle of another store resolves")
        try:
            guess = Handle("geo", "".join(draw.choice(sorted(_ID)) for _ in range(21)))
        except PromptError as error:
            raise WrongError("a well-formed handle was refused") from error
        if guess in store:
            raise WrongError("a guess resolves")

    def case(draw: Random) -> None:
        draw.choice((resolving, resolving, resolving, parsing, forging))(draw)

    yield case
