"""The prefix tree: KV of heads, packs and conversations, shared by every prompt that begins alike.

A radix tree whose edges are canonical chunks. A node's KV is reused only below the same chunks from the root on, so
what is reused was computed under the same tokens, at the same positions, in the same shapes: bit for bit what a cold
run would compute. Tokens that the model generated hang beside the chunks, as `decoded` nodes, which may be matched in
part.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from kp_core.kv import KVTensors
from kp_core.prompt.prompt import common_length

__all__ = ["Node", "Path", "PrefixTree", "Run"]

_serials = itertools.count(1)
_UNLABELLED: Mapping[tuple[int, int], int] = MappingProxyType({})


class Node:
    """A run of tokens with its KV; `serial` names this run of KV and is never given twice."""

    __slots__ = ("children", "decoded", "ids", "is_decoded", "kv", "logits", "parent", "pins", "serial", "users")

    def __init__(
        self, ids: tuple[int, ...], kv: KVTensors | None, parent: Node | None, *, is_decoded: bool = False
    ) -> None:
        self.ids, self.kv, self.parent, self.is_decoded = ids, kv, parent, is_decoded
        self.children: dict[tuple[int, ...], Node] = {}
        self.decoded: list[Node] = []
        self.logits: Tensor | None = None
        self.pins = self.users = 0
        self.serial = next(_serials)

    @property
    def nbytes(self) -> int:
        """Bytes of KV and logits."""
        kept = 0 if self.logits is None else self.logits.nbytes
        return kept + (0 if self.kv is None else self.kv.nbytes)


class Run(NamedTuple):
    """KV of one node as it was when a path stepped onto it; another prompt may split the node later."""

    serial: int
    kv: KVTensors


class Path:
    """The nodes from the root that a prompt was found to begin with; holds them in the tree until `release`."""

    def __init__(self, tree: PrefixTree, root: Node) -> None:
        self._tree, self._open = tree, True
        self.last = root
        self.runs: list[Run] = []
        self.tokens = 0
        self.is_canonical = True
        """Whether every node is a canonical chunk, none of it decoded."""
        self.canonical_tokens = 0
        """Tokens of the nodes before the first that is decoded."""
        root.users += 1

    def extend(
        self, ids: tuple[int, ...], kv: KVTensors, logits: Tensor | None = None, *, is_decoded: bool = False
    ) -> bool:
        """Add a run below the path and step onto it; `False` when there is no room, after which the path is closed."""
        self._open = self._open and self._tree._insert(self, ids, kv, logits, is_decoded=is_decoded)  # noqa: SLF001
        return self._open

    @property
    def is_open(self) -> bool:
        """Whether the tree had room for everything so far."""
        return self._open

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
        self.is_canonical &= not node.is_decoded
        if node.kv is not None:
            self.runs.append(Run(node.serial, node.kv))
            self.tokens += node.kv.tokens
        if self.is_canonical:
            self.canonical_tokens = self.tokens


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
        chunks: Sequence[tuple[int, int]],
        *,
        decoded: bool = True,
        logits: bool = True,
        labels: Mapping[tuple[int, int], int] = _UNLABELLED,
    ) -> Path:
        """The longest path that begins the prompt `ids`, cut at `chunks`.

        With `decoded=False` no generated token is matched. With `logits`, a path over the whole prompt is given only
        where the logits behind it are kept.

        `labels` names chunks whose KV was altered or composed, each by a negative number: such a chunk is one node,
        whose `ids` end with its label, so that neither it nor anything below it is found without the label. No decoded
        node reaches into a labelled chunk.
        """
        with self.lock:
            path, last, at = Path(self, self._root), self._root, 0
            found: list[Node] = []
            for start, stop in chunks:
                label = (labels[start, stop],) if (start, stop) in labels else ()
                node: Node | None = last
                while node is not None and at < stop:
                    node = last.children.get(ids[at:stop] + label)
                    if logits and node is not None and stop == len(ids) and node.logits is None:
                        node = None
                    if node is None and decoded:
                        end = min((begin for begin, _ in labels if begin >= at), default=len(ids) - 1)
                        node = self._match_decoded(last, ids[at:end])
                    if node is not None:
                        found.append(node)
                        last, at = node, at + (0 if node.kv is None else node.kv.tokens)
                if node is None:
                    break
            while self._has_states and found and not (found[-1].kv and found[-1].kv.states):
                found.pop()
            for node in found:
                path._step(node)  # noqa: SLF001
            return self._touched(path)

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

    def _match_decoded(self, parent: Node, ids: tuple[int, ...]) -> Node | None:
        shared = {node: common_length(node.ids, ids) for node in parent.decoded}
        node = max(shared, key=shared.__getitem__, default=None)
        if node is None or shared[node] == 0:
            return None
        return node if shared[node] == len(node.ids) else self._split(node, shared[node])

    def _split(self, node: Node, at: int) -> Node:
        """Put a node of the first `at` tokens above `node`, which keeps the rest; the KV is shared, not copied."""
        parent, kv = node.parent, node.kv
        if parent is None or kv is None:
            raise AssertionError("the root holds no tokens to split")
        upper = Node(node.ids[:at], kv.slice(0, at), parent, is_decoded=True)
        parent.decoded[parent.decoded.index(node)] = upper
        node.ids, node.kv, node.parent = node.ids[at:], kv.slice(at, kv.tokens), upper
        # The run that its old serial named is no more.
        node.serial = next(_serials)
        upper.decoded.append(node)
        self._age[upper] = None
        return upper

    def _insert(
        self, path: Path, ids: tuple[int, ...], kv: KVTensors, logits: Tensor | None, *, is_decoded: bool
    ) -> bool:
        with self.lock:
            parent = path.last
            # Another thread may have been here first, and a chunk may come again for its logits.
            node = None if is_decoded else parent.children.get(ids)
            fresh = node is None
            if node is None:
                node = Node(ids, kv, parent, is_decoded=is_decoded)
            held = (None, None) if fresh else (node.kv, node.logits)
            before = 0 if fresh else node.nbytes
            if node.logits is None:
                node.logits = logits
            if node.kv is not None and kv.states and not node.kv.states:  # The same bits, and the states behind them.
                node.kv = kv
            needed = node.nbytes - before
            if not self._evict(self.nbytes + needed - self.budget_bytes):
                if not fresh:
                    node.kv, node.logits = held
                return False
            self.nbytes += needed
            if fresh and is_decoded:
                parent.decoded.append(node)
            elif fresh:
                parent.children[ids] = node
            self._age[node] = None
            path._step(node)  # noqa: SLF001
            return True

    def _touched(self, path: Path) -> Path:
        node = path.last
        while node.parent is not None:
            self._age.move_to_end(node)
            node = node.parent
        return path

    def _evict(self, excess: int) -> bool:
        """Free at least `excess` bytes; whether that was possible."""
        while excess > 0:
            victim = next((node for node in self._age if _is_free(node)), None)
            if victim is None or victim.parent is None:
                return False
            if victim.is_decoded:
                victim.parent.decoded.remove(victim)
            else:
                del victim.parent.children[victim.ids]
            del self._age[victim]
            self.nbytes -= victim.nbytes
            excess -= victim.nbytes
        return True


def _is_free(node: Node) -> bool:
    return not (node.children or node.decoded or node.pins or node.users)
