"""A store of packs against a dictionary: damage, other models, quotas, full disks, clocks that jump, dead writers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kp_core import KnowledgePack, PackStore
from kp_core.errors import PackCorruptError, PackError, PackNotFoundError
from kp_core.packs.handle import Handle
from kp_core.packs.pack import PackKey, Prefix
from tests.attack.harness import Case, LostError, WrongError
from tests.attack.machines import StoreMachine, walk
from tests.attack.trouble import full_disk
from tests.core.packs.made import FINGERPRINT, UNKNOWN, make_pack, same

SHORT = 2

_TEXTS = ("One.", "Two.", "Drei 🗼", "a\u2028b\x00", "x" * 3000)
_SPACES = ("geo", "default")
_MODELS = tuple(replace(FINGERPRINT, weights=name) for name in ("weights", "others"))
_PREFIXES = (Prefix((9, 8)), Prefix((1,)), Prefix())


class Packs(StoreMachine):
    """`held`: by handle, by what it was compiled for, the last pack that was put; `kvless` and `textless`: whose KV or
    text file may be gone."""

    @initialize(bounded=st.booleans())
    def open(self, bounded: bool) -> None:  # noqa: FBT001 - Hypothesis draws it
        self.max_bytes = 40_000 if bounded else None
        self.store = PackStore(self.folder / "s", max_bytes=self.max_bytes)
        self.held: dict[Handle, dict[PackKey, KnowledgePack]] = {}
        self.ever: dict[tuple[Handle, PackKey], list[KnowledgePack]] = {}
        self.kvless: set[Handle] = set()
        self.textless: set[Handle] = set()

    @rule(text=st.sampled_from(_TEXTS), space=st.sampled_from(_SPACES), seed=st.integers(0, 9), model=st.sampled_from(_MODELS),
          prefix=st.sampled_from(_PREFIXES), packed=st.sampled_from(("none", "lossless")), full=st.sampled_from((None,) * 4 + (0, 300, 1200)))  # fmt: skip
    def put(self, text, space, seed, model, prefix, packed, full) -> None:
        pack = make_pack(text, space, seed=seed, fingerprint=model, prefix=prefix).compressed(packed)
        if full is None:
            self._put(pack)
            return
        with full_disk(full), suppress(OSError):  # What the medium says comes as it is.
            self._put(pack)
            return
        # What failed is not there, or whole.
        handle = self.store.handle(text, space)
        if handle in self.store and handle not in self.held:
            found = self.store.get(handle)
            if not (same(found, pack) or (found.text == text and found.kv is None)):
                raise WrongError("half a pack was left by a full disk")
            self.held[handle] = {pack.key: pack}
            self.kvless.add(handle)
        elif handle in self.held:
            self.held[handle].setdefault(pack.key, pack)
            if any(same(each, pack) for each in [self.store.get(handle, pack.key)]):
                self.held[handle][pack.key] = pack
            self.kvless.add(handle)

    @rule(text=st.sampled_from(_TEXTS), space=st.sampled_from(_SPACES))
    def put_text_alone(self, text, space) -> None:
        handle = self.store.put(KnowledgePack(text, space, (), Prefix(), UNKNOWN))
        self.textless.discard(handle)
        self.held.setdefault(handle, {})

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data) -> None:
        handle = data.draw(st.sampled_from(self._named()))
        self.store.remove(handle)
        del self.held[handle]
        self.kvless.discard(handle)

    @rule(text=st.sampled_from(_TEXTS))
    def remove_what_is_not_there(self, text) -> None:
        handle = self.store.handle(text, "nowhere")
        with suppress(PackNotFoundError):
            self.store.remove(handle)
            raise WrongError("what was never put was removed")

    @rule()
    def reopen(self) -> None:
        self.store = PackStore(self.folder / "s", max_bytes=self.max_bytes)

    @rule()
    def a_writer_died(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / "s" / "staging" / "left.tmp").write_bytes(b"half a pack")

    @precondition(lambda self: self.held)
    @rule(data=st.data(), at=st.integers(0, 10**6), how=st.sampled_from(("flip", "cut", "gone", "empty")))
    def damage(self, data, at, how) -> None:
        """One file of a pack is damaged; its text stays, and what else is compiled of it, or is compiled again."""
        handle = data.draw(st.sampled_from(self._named()))
        files = sorted((self.folder / "s" / "packs" / handle.namespace / handle.id[:2]).glob(f"{handle.id}*"))
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        if how == "gone":
            file.unlink()
        else:
            at %= max(1, len(content))
            content[at : at + 1] = bytes([content[at] ^ 4]) if content else b""
            file.write_bytes({"flip": content, "cut": content[:at], "empty": b""}[how])
        self.kvless.add(handle)
        if file.suffix == ".txt":  # A later `put` mends it.
            self.textless.add(handle)
        with suppress(PackCorruptError, PackNotFoundError):
            self.store.get(handle)
            return
        if handle not in self.textless:
            raise LostError(f"{handle} had {len(files)} files, and {how} of {file.name} cost its text")
        # The text was damaged, and stays so until it is put anew or removed.
        with suppress(PackNotFoundError):
            self.store.remove(handle)
        del self.held[handle]

    @invariant()
    def what_is_held_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        for handle, entries in self.held.items():
            plain = self.store.get(handle)
            if (plain.text, plain.namespace) != (self._text(handle), handle.namespace):
                raise WrongError(f"{handle} is {plain.text[:40]!r}")
            for key, pack in entries.items():
                found = self.store.get(handle, key)
                if handle in self.kvless:  # The first line may be gone, with the provenance; KV is found by its key.
                    found = replace(found, provenance=pack.provenance)
                if same(found, pack):
                    continue
                # Behind damage an earlier KV for the same key may come to light, as good as the later.
                known = handle in self.kvless and any(same(found, each) for each in self.ever[handle, key])
                if found.text != pack.text or (found.kv is not None and key.fits(found) and not known):
                    raise WrongError(f"{handle} gives another pack than the one that was put")
                if handle not in self.kvless and self.max_bytes is None:
                    raise LostError(f"{handle} lost the KV of {key.model.weights}, {key.prefix}")
        if set(self.store) != set(self.held):
            missing = set(self.held) - set(self.store)
            raise (LostError if missing else WrongError)(f"{missing} are gone, {set(self.store) - set(self.held)} came")
        if self.max_bytes is not None and self.store.nbytes > self.max_bytes:
            raise WrongError(f"{self.store.nbytes} bytes of {self.max_bytes}")

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self._empty()
        finally:
            super().teardown()

    def _empty(self) -> None:
        """With every pack removed nothing of their texts is on the disk."""
        for handle in [self.store.handle(text, space) for text in _TEXTS for space in _SPACES]:
            with suppress(PackNotFoundError):
                self.store.remove(handle)
        left = [path for path in (self.folder / "s" / "packs").rglob("*") if path.is_file()]
        if left or len(self.store):
            raise WrongError(f"what was removed left {left[:3]}")

    def _put(self, pack: KnowledgePack) -> None:
        self.ever.setdefault((self.store.handle(pack.text, pack.namespace), pack.key), []).append(pack)
        try:
            handle = self.store.put(pack)
        except PackError:
            if self.max_bytes is None:
                raise WrongError("a store without a bound was full") from None
            return
        self.held.setdefault(handle, {})[pack.key] = pack
        self.textless.discard(handle)

    def _named(self) -> list[Handle]:
        # By text, as ids depend on the secret of each run.
        return sorted(self.held, key=lambda handle: (handle.namespace, self._text(handle)))

    def _text(self, handle: Handle) -> str:
        return next(text for text in _TEXTS if self.store.handle(text, handle.namespace) == handle)


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    del folder  # Each walk has its own.
    yield lambda draw: walk(Packs, draw)
