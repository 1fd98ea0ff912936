"""The prefix tree: KV that all prompts with the same beginning share.

A radix tree over token ids. A node holds consecutive tokens with their KV, and is split where another prompt continues
with a different token. The KV of a token depends only on the tokens before it, so any common prefix may be reused.
"""

# ruff: noqa: SLF001 - a path is a part of its tree

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from kp_core.engines.local.copies import to_host
from kp_core.events import log_event
from kp_core.kv import KVTensors
from kp_core.packs.pack import common_length

logger = logging.getLogger(__name__)

_UNLABELLED: Mapping[int, tuple[int, int]] = MappingProxyType({})

Name: TypeAlias = tuple[int, int, int]
"""Names some tokens of an inserted KV: the serial of that KV, the first token in it, the number of tokens."""


@dataclass(eq=False, slots=True)
class Node:
    """Consecutive tokens with their KV.

    Only a request that may read all `owners`, the namespaces of the packs in it, finds the node and those below. A node
    of altered or composed KV has a `label`: it is found under this label, and matched only as a whole. The node has the
    tokens from `begin` on of the inserted KV number `serial`; after a split both nodes keep the serial, and the
    `packs`: the handle of each pack with tokens here, and where in the prompt it ends.
    """

    ids: tuple[int, ...]
    kv: KVTensors
    parent: Node | None
    owners: frozenset[str] = frozenset()
    packs: frozenset[tuple[str, int]] = frozenset()
    label: int = 0
    logits: Tensor | None = None
    serial: int = field(default_factory=itertools.count(1).__next__)
    begin: int = 0
    children: dict[object, list[Node]] = field(default_factory=dict)
    users: int = 0

    @property
    def key(self) -> object:
        """Its key in `children` of its parent."""
        return _key(self.ids, self.label)

    @property
    def line(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def below(self) -> Iterator[Node]:
        """The children of this node."""
        return itertools.chain.from_iterable(self.children.values())

    @property
    def nbytes(self) -> int:
        """Bytes of KV and logits."""
        return self.kv.nbytes + (0 if self.logits is None else self.logits.nbytes)


_End: TypeAlias = "tuple[int, Node, int, _End | None]"
"""Where a match ends: the tokens up to there, the last node, how many tokens of it match, and where that one began."""


def _key(ids: tuple[int, ...], label: int) -> object:
    return (label, ids) if label else ids[0]


def common_tokens(left: Sequence[Name], right: Sequence[Name]) -> int:
    """How many tokens, from the first on, are the same KV in both, even if they are cut differently."""
    total, left_names, right_names = 0, list(reversed(left)), list(reversed(right))
    while left_names and right_names:
        (serial, begin, count), (other_serial, other_begin, other_count) = left_names.pop(), right_names.pop()
        if (serial, begin) != (other_serial, other_begin):
            break
        shared = min(count, other_count)
        total += shared
        if count > shared:
            left_names.append((serial, begin + shared, count - shared))
        if other_count > shared:
            right_names.append((other_serial, begin + shared, other_count - shared))
    return total


class Path:
    """The nodes from the root that match the beginning of a prompt. They stay in the tree until `release`."""

    def __init__(self, tree: PrefixTree, root: Node) -> None:
        self._tree = tree
        self.is_open = True
        """Whether more tokens may be inserted. The tree sets it to `False` when it has no room."""
        self.owes = False
        """Whether tokens of the prompt are inserted later; see `owe`."""
        self.last = root
        self.held: list[tuple[Name, KVTensors]] = []
        """The KV of each node, as it was when the path reached it; another prompt may split the node later."""
        self.tokens = 0
        self.owners: frozenset[str] = frozenset()
        """Owners of the nodes."""
        root.users += 1

    def extend(  # noqa: PLR0913 - what a node is
        self,
        ids: tuple[int, ...],
        kv: KVTensors,
        logits: Tensor | None = None,
        *,
        owners: Collection[str] = (),
        packs: Collection[tuple[str, int]] = (),
        label: int = 0,
    ) -> bool:
        """Insert tokens and extend the path to them. Returns `False`, and closes the path, if there is no room."""
        tree, readers = self._tree, frozenset(owners)
        with tree.lock:
            while ids and self.is_open:
                children = self.last.children.get(_key(ids, label), [])
                node = next((child for child in children if child.owners == readers), None)
                if node is None:
                    node = Node(ids, kv, self.last, readers, frozenset(packs), label, logits)
                    self.is_open = tree._add(node)
                    if self.is_open:
                        self._step(node)
                    break
                # Another thread inserted these tokens first, or they come again with logits or states.
                shared = common_length(node.ids, ids)
                if shared < len(node.ids):
                    node = tree._split(node, shared)
                ids, kv = ids[shared:], kv.slice(shared, kv.tokens)
                self.is_open = bool(ids) or tree._complete(node, kv, logits)
                if self.is_open:
                    self._step(node)
            return self.is_open

    def bring_back(self, read: Callable[[int, int], KVTensors], device: torch.device) -> None:
        """Move nodes in host memory back to `device`, as far as there is room.

        `read(start, stop)` gives their KV on the device.
        """
        tree, stop = self._tree, 0
        with tree.lock:
            nodes = list(self.last.line)[::-1]
            with tree._using(nodes):  # Making room for one must not evict another.
                for node in nodes:
                    start, stop = stop, stop + len(node.ids)
                    is_cold = node in tree._cold
                    if is_cold and not tree._evict(tree.nbytes + node.nbytes - tree.budget_bytes):
                        continue
                    if is_cold or node.kv.device != device:
                        kv = read(start, stop)
                        node.kv = replace(kv, states=tuple(state.to(device) for state in node.kv.states))
                        node.logits = None if node.logits is None else node.logits.to(device)
                    if is_cold:
                        del tree._cold[node]
                        tree._age[node] = None
                        tree.host_nbytes -= node.nbytes
                        tree.nbytes += node.nbytes

    def owe(self, *, owes: bool) -> None:
        """Record whether tokens of the prompt are inserted later, so that `PrefixTree.forget` knows."""
        with self._tree.lock:
            self._tree._owed += owes - self.owes
            self.owes = owes

    def release(self) -> None:
        """Allow the tree to evict these nodes again."""
        self.owe(owes=False)
        with self._tree.lock:
            self.last.users -= 1

    def _step(self, node: Node) -> None:
        self.last.users -= 1
        node.users += 1
        self.last = node
        self.held.append(((node.serial, node.begin, node.kv.tokens), node.kv))
        self.tokens += node.kv.tokens
        self.owners |= node.owners


class PrefixTree:
    """Prefix tree with a byte budget. Evicts the least recently used leaves first, but none that is in use.

    Evicted nodes move to host memory, within `host_bytes`, and back when a request uses them; the oldest there are
    dropped. KV that does not fit is not kept. With `has_states`, a path ends only where the states of recurrent layers
    are known, because the model can continue only from there. Several threads may use it.
    """

    def __init__(self, budget_bytes: int, *, has_states: bool = False, host_bytes: int = 0) -> None:
        self.budget_bytes, self.host_bytes, self._has_states = budget_bytes, host_bytes, has_states
        self.nbytes = self.host_nbytes = 0
        self._owed = 0  # Paths that are extended later.
        self.lock = threading.RLock()
        self._root = Node((), KVTensors((torch.empty(0, 0, 0),), (torch.empty(0, 0, 0),)), None)
        # Least recently used first. A path is touched from leaf to root, so a leaf comes before its ancestors.
        self._age: OrderedDict[Node, None] = OrderedDict()
        self._cold: OrderedDict[Node, None] = OrderedDict()
        """The nodes in host memory, in the same order. They share no memory."""
        self._left = list[tuple[Node, KVTensors]]()
        """Nodes that left the device, with the KV that they had there; other nodes may share its memory."""

    def __len__(self) -> int:
        return len(self._age) + len(self._cold)

    def held_bytes(self) -> int:
        """Bytes on the device of nodes that are in use, and their ancestors."""
        with self.lock:
            nodes = {node for held in (*self._age, *self._cold) if held.users for node in held.line}
            return sum(node.nbytes for node in nodes & self._age.keys())

    @property
    def is_empty(self) -> bool:
        """Whether the tree has no nodes and no path is in use."""
        with self.lock:
            return not len(self) and not self._root.users

    def match(
        self,
        ids: tuple[int, ...],
        *,
        owners: Collection[str] = (),
        labels: Mapping[int, tuple[int, int]] = _UNLABELLED,
        logits: bool = True,
    ) -> Path:
        """The longest path that matches the beginning of the prompt `ids`, of nodes whose owners are all in `owners`.

        `labels` maps the start of each altered or composed region to its end and its negative label. With `logits`, the
        path covers the whole prompt only if the tree has the logits after it; otherwise it ends before the last token.
        """
        with self.lock:
            matches = self._longest(ids, frozenset(owners), labels)
            is_whole = sum(count for _, count in matches) == len(ids) > 0
            if logits and is_whole and not (_is_all(*matches[-1]) and matches[-1][0].logits is not None):
                node, count = matches.pop()
                if count > 1 and not node.label:
                    matches.append((node, count - 1))
            while self._has_states and matches and not (_is_all(*matches[-1]) and matches[-1][0].kv.states):
                matches.pop()
            path = Path(self, self._root)
            for node, count in matches:
                path._step(node if _is_all(node, count) else self._split(node, count))
            for node in path.last.line:
                self._order_of(node).move_to_end(node)
            return path

    def _longest(
        self, ids: tuple[int, ...], readable: frozenset[str], labels: Mapping[int, tuple[int, int]]
    ) -> list[tuple[Node, int]]:
        """The nodes that match the beginning of `ids`, each with the number of its tokens that match."""
        ends: list[_End] = [(0, self._root, 0, None)]
        best, longest = next(iter(ends), None), 0
        while ends:
            end = ends.pop()
            at, node, count, _ = end
            if at > longest:
                best, longest = end, at
            if count < len(node.ids) or at == len(ids):
                continue
            stop, label = labels.get(at, (min((start for start in labels if start > at), default=len(ids)), 0))
            children = node.children.get(_key(ids[at:stop], label) if label else ids[at], [])
            # Texts of several owners may begin alike.
            for child in reversed([child for child in children if child.owners <= readable]):
                count = _common(child, ids, at, stop)
                ends.append((at + count, child, count, end))
        matches: list[tuple[Node, int]] = []
        while best is not None:
            _, node, count, best = best
            matches.append((node, count))
        return matches[-2::-1]

    def shrink(self, budget_bytes: int) -> bool:
        """Set a new budget, and evict what exceeds it; `False`, with the old budget, if what is in use does not fit."""
        with self.lock:
            fits = self._evict(self.nbytes - budget_bytes)
            if fits:
                self.budget_bytes = budget_bytes
            return fits

    def vacate(self) -> None:
        """Evict everything that is not in use from the memory of the device."""
        with self.lock:
            self._evict(self.nbytes)

    def clear(self) -> None:
        """Drop everything that is not in use."""
        with self.lock:
            host_bytes, self.host_bytes = self.host_bytes, 0
            self._evict(self.nbytes)
            self._drop_cold(0)
            self.host_bytes = host_bytes

    @property
    def packs(self) -> frozenset[str]:
        """The handles of all packs with KV here."""
        with self.lock:
            return frozenset(handle for node in (*self._age, *self._cold) for handle, _ in node.packs)

    def forget(self, packs: Collection[str]) -> bool:
        """Drop the KV of these packs, and all behind it; `False` if some is in use and stays, or may come later."""
        with self.lock:
            depths = {node: sum(len(each.ids) for each in node.line) for node in (*self._age, *self._cold)}
            is_done = not self._owed
            for node in sorted(depths, key=lambda node: -depths[node]):
                stops = [stop for handle, stop in node.packs if handle in packs]
                # What others begin with, too, is theirs as well.
                if stops and not (node.children and min(stops) > depths[node]) and node in self._order_of(node):
                    is_done &= self._drop(node)
            self._unshare()
            return is_done

    def _order_of(self, node: Node) -> OrderedDict[Node, None]:
        return self._cold if node in self._cold else self._age

    def _split(self, node: Node, at: int) -> Node:
        """Insert a node with the first `at` tokens above `node`, which keeps the rest. On the device they share KV."""
        parent, kv = node.parent, node.kv
        if parent is None:
            raise AssertionError("the root holds no tokens to split")
        parts = kv.slice(0, at), kv.slice(at, kv.tokens)
        if node in self._cold:
            with suppress(RuntimeError):  # Where the system pins no more, they share it, too.
                parts = to_host(parts[0]), to_host(parts[1])
        upper = Node(node.ids[:at], parts[0], parent, node.owners, node.packs, serial=node.serial, begin=node.begin)
        siblings = parent.children[node.key]
        siblings[siblings.index(node)] = upper
        node.ids, node.kv, node.parent = node.ids[at:], parts[1], upper
        node.begin += at
        upper.children[node.key] = [node]
        self._order_of(node)[upper] = None
        return upper

    def _complete(self, node: Node, kv: KVTensors, logits: Tensor | None) -> bool:
        """Add the logits after the last token and the states to a node that lacks them; `False` without room."""
        if node in self._cold:
            return True  # It gets them when it is back on the device.
        logits = logits if node.logits is None else None
        states = () if node.kv.states else kv.states
        added_bytes = sum(tensor.nbytes for tensor in (logits, *states) if tensor is not None)
        with self._using([node]):
            if added_bytes and not self._evict(self.nbytes + added_bytes - self.budget_bytes):
                return False
        self.nbytes += added_bytes
        node.logits = node.logits if logits is None else logits
        node.kv = replace(node.kv, states=states) if states else node.kv
        return True

    @contextmanager
    def _using(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Within, these nodes stay."""
        for node in nodes:
            node.users += 1
        try:
            yield
        finally:
            for node in nodes:
                node.users -= 1

    def _add(self, node: Node) -> bool:
        """Add a node below its parent; `False` without room."""
        if node.parent is None or not self._evict(self.nbytes + node.nbytes - self.budget_bytes):
            return False
        self.nbytes += node.nbytes
        node.parent.children.setdefault(node.key, []).append(node)
        self._age[node] = None
        return True

    def _evict(self, excess: int) -> bool:
        """Free at least `excess` bytes on the device. Returns whether that was possible."""
        nbytes, host_nbytes, stuck = self.nbytes, self.host_nbytes, set[Node]()
        while nbytes - self.nbytes < excess:
            victim = next((node for node in self._age if node not in stuck and self._may_go(node)), None)
            if victim is None:
                break
            if not self._move_out(victim) and not self._drop(victim):
                stuck.add(victim)
        if count := len(self._left):
            self._unshare()
            moved = max(0, self.host_nbytes - host_nbytes)
            log_event(logger, "KV evicted from memory", nodes=count, nbytes=nbytes - self.nbytes, to_host=moved)
        return nbytes - self.nbytes >= excess

    def _may_go(self, node: Node) -> bool:
        """Whether a node may leave the device. What is below it there goes first."""
        return not (node.users or any(child in self._age for child in node.below))

    def _move_out(self, node: Node) -> bool:
        """Move a node to host memory; `False` without room."""
        is_small = self.host_bytes and node.nbytes <= self.host_bytes
        if not is_small or not self._drop_cold(self.host_bytes - node.nbytes):
            return False
        try:
            kv = to_host(node.kv)
        except RuntimeError as error:  # The system may refuse to pin so much.
            logger.warning("KV in host memory stays within %s bytes: %s", f"{self.host_nbytes:,}", error)
            self.host_bytes = self.host_nbytes
            return False
        self._leave(node)
        node.kv, node.logits = kv, None if node.logits is None else node.logits.cpu()
        self.host_nbytes += node.nbytes
        self._cold[node] = None
        return True

    def _drop_cold(self, budget_bytes: int) -> bool:
        """Drop the oldest nodes in host memory until the rest fits. Returns whether that was possible."""
        while self.host_nbytes > budget_bytes:
            node = next((node for node in self._cold if not (node.children or node.users)), None)
            if node is None:
                return False
            self._drop(node)
        return True

    def _drop(self, node: Node) -> bool:
        """Drop a node and what is below it, except what is in use. Returns whether the node was dropped."""
        for child in [*node.below]:
            self._drop(child)
        if node.children or node.users or node.parent is None:
            return False
        self._leave(node)
        siblings = node.parent.children[node.key]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.key]
        return True

    def _leave(self, node: Node) -> None:
        """Take a node out of the memory in which it is."""
        if node in self._cold:
            del self._cold[node]
            self.host_nbytes -= node.nbytes
        else:
            del self._age[node]
            self.nbytes -= node.nbytes
            self._left.append((node, node.kv))

    def _unshare(self) -> None:
        """Copy the KV of nodes that share memory with one that left the device, so that this memory is freed.

        They are ancestors: nodes share it after a split, and if their KV was inserted at once.
        """
        for victim, kv in self._left:
            for node in itertools.islice(victim.line, 1, None):
                if _storage(node.kv) != _storage(kv):
                    break
                if node in self._age:
                    node.kv = node.kv.clone()
        self._left.clear()


def _storage(kv: KVTensors) -> int:
    return kv.keys[0].untyped_storage().data_ptr()


def _is_all(node: Node, count: int) -> bool:
    return count == len(node.ids)


def _common(node: Node, ids: tuple[int, ...], at: int, stop: int) -> int:
    """How many tokens of `node` match `ids` from `at` on, up to `stop`."""
    size = min(len(node.ids), stop - at)
    return size if ids[at : at + size] == node.ids[:size] else common_length(node.ids, ids[at : at + size])
