"""The prefix tree: KV of heads, packs and conversations, shared by every prompt that begins alike.

A radix tree over token ids: a node holds some tokens with their KV, and is split wherever another prompt goes on with
another token. KV of a token depends on the tokens before it alone, so any common beginning may be reused.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from kp_core.kv import KVTensors
from kp_core.packs.pack import common_length

__all__ = ["Name", "Node", "Path", "PrefixTree", "common_tokens"]

_serials = itertools.count(1)
_UNLABELLED: Mapping[int, tuple[int, int]] = MappingProxyType({})

Name: TypeAlias = tuple[int, int, int]
"""Which tokens of which KV: its serial, the first token, the number of tokens."""


class Node:
    """Some tokens with their KV.

    `owners` are the namespaces of the packs they belong to: who may not read all of them does not find the node, nor
    what is below it. A node of KV that was altered or composed has a `label`, is found by it, and is matched whole.
    `serial` names the KV that was inserted, of which this node has the tokens from `begin` on; a split renames nothing.
    """

    __slots__ = ("begin", "children", "ids", "kv", "label", "logits", "owners", "parent", "pins", "serial", "users")

    def __init__(  # noqa: PLR0913 - what a node is
        self,
        ids: tuple[int, ...],
        kv: KVTensors | None,
        parent: Node | None,
        *,
        owners: frozenset[str] = frozenset(),
        label: int = 0,
        serial: int = 0,
        begin: int = 0,
    ) -> None:
        self.ids, self.kv, self.parent, self.owners, self.label = ids, kv, parent, owners, label
        self.children: dict[object, list[Node]] = {}
        self.logits: Tensor | None = None
        self.pins = self.users = 0
        self.serial, self.begin = serial or next(_serials), begin

    @property
    def key(self) -> object:
        """What it is found by among the children of its parent."""
        return _key(self.ids, self.label)

    @property
    def nbytes(self) -> int:
        """Bytes of KV and logits."""
        kept = 0 if self.logits is None else self.logits.nbytes
        return kept + (0 if self.kv is None else self.kv.nbytes)


def _key(ids: tuple[int, ...], label: int) -> object:
    return (label, ids) if label else ids[0]


def common_tokens(left: Sequence[Name], right: Sequence[Name]) -> int:
    """How many tokens, from the first on, are the same KV in both, however it is divided."""
    total, mine, theirs = 0, list(reversed(left)), list(reversed(right))
    while mine and theirs:
        (serial, begin, count), (other, other_begin, other_count) = mine.pop(), theirs.pop()
        if (serial, begin) != (other, other_begin):
            break
        same = min(count, other_count)
        total += same
        if count > same:
            mine.append((serial, begin + same, count - same))
        if other_count > same:
            theirs.append((other, begin + same, other_count - same))
    return total


class Path:
    """The nodes from the root that a prompt was found to begin with; holds them in the tree until `release`."""

    def __init__(self, tree: PrefixTree, root: Node) -> None:
        self._tree = tree
        self.is_open = True
        """Whether the tree had room for everything so far, and what follows may be kept."""
        self.last = root
        self.held: list[tuple[Name, KVTensors]] = []
        """The KV of each node as it was when the path stepped onto it; another prompt may split the node later."""
        self.tokens = 0
        root.users += 1

    def extend(
        self,
        ids: tuple[int, ...],
        kv: KVTensors,
        logits: Tensor | None = None,
        *,
        owners: Collection[str] = (),
        label: int = 0,
    ) -> bool:
        """Add tokens below the path and step onto them; `False` when there is no room: the path is then closed."""
        self.is_open = self.is_open and self._tree._insert(self, ids, kv, logits, frozenset(owners), label)  # noqa: SLF001
        return self.is_open

    def pin(self) -> Node:
        """Keep the whole path in the tree until `PrefixTree.unpin` of the node given back."""
        with self._tree.lock:
            self.last.pins += 1
            return self.last

    def release(self) -> None:
        """Let the tree evict these nodes again."""
        with self._tree.lock:
            self.last.users -= 1

    def _step(self, node: Node) -> None:
        self.last.users -= 1
        node.users += 1
        self.last = node
        if node.kv is not None:
            self.held.append(((node.serial, node.begin, node.kv.tokens), node.kv))
            self.tokens += node.kv.tokens


class PrefixTree:
    """Prefix tree with a byte budget: the least recently used leaves go first, never one that is pinned or in use.

    `nbytes` stays within `budget_bytes`; what does not fit is not kept. All methods may be called from several threads.
    With `has_states`, a model goes on only from where the states of its recurrent layers are known: a path ends there.
    """

    def __init__(self, budget_bytes: int, *, has_states: bool = False) -> None:
        self.budget_bytes, self._has_states = budget_bytes, has_states
        self.nbytes = 0
        self.lock = threading.RLock()
        self._root = Node((), None, None)
        # Oldest first. A path is touched from its leaf to its root, so leaves grow old before what they stand on.
        self._age: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._age)

    def held_bytes(self, *, pinned_only: bool = False) -> int:
        """Bytes of the nodes that are pinned or in use, and of all before them."""
        with self.lock:
            held: set[Node] = set()
            for node in self._age:
                above: Node | None = node if node.pins or (node.users and not pinned_only) else None
                while above is not None and above not in held:
                    held.add(above)
                    above = above.parent
            return sum(node.nbytes for node in held)

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing, and nobody holds it."""
        with self.lock:
            return not self._age and not self._root.users

    def match(
        self,
        ids: tuple[int, ...],
        *,
        owners: Collection[str] = (),
        labels: Mapping[int, tuple[int, int]] = _UNLABELLED,
        logits: bool = True,
    ) -> Path:
        """The longest path that begins the prompt `ids`, over nodes of nobody and of `owners`.

        `labels` gives, by the position where they begin, the end and the negative label of what is altered or composed:
        such tokens are one node, which is found by its label alone and matched whole. With `logits`, a path over the
        whole prompt is given only where the logits behind it are kept; otherwise it ends before the last token.
        """
        with self.lock:
            found = self._longest(self._root, ids, 0, frozenset(owners), labels)
            is_whole = bool(found) and sum(count for _, count in found) == len(ids)
            if logits and is_whole and not (_is_all(*found[-1]) and found[-1][0].logits is not None):
                node, count = found.pop()
                if count > 1 and not node.label:
                    found.append((node, count - 1))
            while self._has_states and found and not (_is_all(*found[-1]) and _has_states(found[-1][0])):
                found.pop()
            path = Path(self, self._root)
            for node, count in found:
                path._step(node if _is_all(node, count) else self._split(node, count))  # noqa: SLF001
            touched = path.last
            while touched.parent is not None:
                self._age.move_to_end(touched)
                touched = touched.parent
            return path

    def _longest(
        self,
        node: Node,
        ids: tuple[int, ...],
        at: int,
        readable: frozenset[str],
        labels: Mapping[int, tuple[int, int]],
    ) -> list[tuple[Node, int]]:
        """The nodes below `node` that go on with `ids` from `at`, and how many tokens of each do."""
        found: list[tuple[Node, int]] = []
        while at < len(ids):
            stop, label = labels.get(at, (min((start for start in labels if start > at), default=len(ids)), 0))
            children = node.children.get(_key(ids[at:stop], label) if label else ids[at], [])
            children = [child for child in children if child.owners <= readable]
            if len(children) > 1:  # Texts that begin alike, of several owners.
                branches = [self._branch(child, ids, at, stop, readable, labels) for child in children]
                return found + max(branches, key=lambda branch: sum(count for _, count in branch))
            if not children:
                break
            node = children[0]
            count = _common(node, ids, at, stop)
            found.append((node, count))
            at += count
            if count < len(node.ids):
                break
        return found

    def _branch(  # noqa: PLR0913
        self,
        child: Node,
        ids: tuple[int, ...],
        at: int,
        stop: int,
        readable: frozenset[str],
        labels: Mapping[int, tuple[int, int]],
    ) -> list[tuple[Node, int]]:
        count = _common(child, ids, at, stop)
        behind = self._longest(child, ids, at + count, readable, labels) if count == len(child.ids) else []
        return [(child, count), *behind]

    def unpin(self, node: Node) -> None:
        """Undo one `Path.pin` of the path that ends in `node`."""
        with self.lock:
            node.pins -= 1

    def shrink(self, budget_bytes: int) -> bool:
        """Keep to another budget from here on, if what is pinned and in use fits into it."""
        with self.lock:
            fits = self._evict(self.nbytes - budget_bytes)
            if fits:
                self.budget_bytes = budget_bytes
            return fits

    def clear(self) -> None:
        """Drop everything that is neither pinned nor in use."""
        with self.lock:
            self._evict(self.nbytes)

    def _split(self, node: Node, at: int) -> Node:
        """Put a node of the first `at` tokens above `node`, which keeps the rest; the KV is shared, not copied."""
        parent, kv = node.parent, node.kv
        if parent is None or kv is None:
            raise AssertionError("the root holds no tokens to split")
        upper = Node(node.ids[:at], kv.slice(0, at), parent, owners=node.owners, serial=node.serial, begin=node.begin)
        siblings = parent.children[node.key]
        siblings[siblings.index(node)] = upper
        node.ids, node.kv, node.parent = node.ids[at:], kv.slice(at, kv.tokens), upper
        node.begin += at
        upper.children[node.key] = [node]
        self._age[upper] = None
        return upper

    def _insert(  # noqa: PLR0913 - as `Path.extend`
        self,
        path: Path,
        ids: tuple[int, ...],
        kv: KVTensors,
        logits: Tensor | None,
        owners: frozenset[str],
        label: int,
    ) -> bool:
        with self.lock:
            while ids:
                among = path.last.children.get(_key(ids, label), [])
                node = next((child for child in among if child.owners == owners), None)
                if node is None:
                    return self._add(path, Node(ids, kv, path.last, owners=owners, label=label), logits)
                # Another thread was here first, or tokens come again for their logits or their states.
                same = common_length(node.ids, ids)
                if same < len(node.ids):
                    node = self._split(node, same)
                ids, kv = ids[same:], kv.slice(same, kv.tokens)
                if not ids and not self._complete(node, kv, logits):
                    return False
                path._step(node)  # noqa: SLF001
            return True

    def _complete(self, node: Node, kv: KVTensors, logits: Tensor | None) -> bool:
        """Give a node what it lacks: the logits behind its last token, and the states."""
        added = 0
        if node.logits is None and logits is not None:
            added += logits.nbytes
        if node.kv is not None and kv.states and not node.kv.states:
            added += kv.state_bytes
        if not added:
            return True
        node.users += 1  # It is not to be evicted for its own sake.
        try:
            if not self._evict(self.nbytes + added - self.budget_bytes):
                return False
        finally:
            node.users -= 1
        self.nbytes += added
        if node.logits is None:
            node.logits = logits
        if node.kv is not None and kv.states and not node.kv.states:
            node.kv = KVTensors(node.kv.keys, node.kv.values, kv.states)
        return True

    def _add(self, path: Path, node: Node, logits: Tensor | None) -> bool:
        node.logits = logits
        if not self._evict(self.nbytes + node.nbytes - self.budget_bytes):
            return False
        self.nbytes += node.nbytes
        path.last.children.setdefault(node.key, []).append(node)
        self._age[node] = None
        path._step(node)  # noqa: SLF001
        return True

    def _evict(self, excess: int) -> bool:
        """Free at least `excess` bytes; whether that was possible."""
        while excess > 0:
            victim = next((node for node in self._age if not (node.children or node.pins or node.users)), None)
            if victim is None or victim.parent is None:
                return False
            self.nbytes -= victim.nbytes
            excess -= victim.nbytes
            siblings = victim.parent.children[victim.key]
            siblings.remove(victim)
            if not siblings:
                del victim.parent.children[victim.key]
            del self._age[victim]
            self._release_storage(victim)
        return True

    def _release_storage(self, victim: Node) -> None:
        """Copy what is left of the KV that `victim` had a part of, so that the memory of its part is given back."""
        node = victim.parent
        while node is not None and node.serial == victim.serial and node.kv is not None:
            node.kv, node = node.kv.clone(), node.parent


def _is_all(node: Node, count: int) -> bool:
    return count == len(node.ids)


def _has_states(node: Node) -> bool:
    return node.kv is not None and bool(node.kv.states)


def _common(node: Node, ids: tuple[int, ...], at: int, stop: int) -> int:
    """How many tokens of `node` stand in `ids` from `at` on, before `stop`."""
    size = min(len(node.ids), stop - at)
    return size if ids[at : at + size] == node.ids[:size] else common_length(node.ids, ids[at : at + size])
