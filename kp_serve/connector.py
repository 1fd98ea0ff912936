"""KV connector of vLLM: loads packs from a store into the paged cache, and stores KV that vLLM computed for packs.

`--kv-transfer-config` names it, as `kp serve` does. A request loads and saves only what its signed parameters
grant (`rights`); without them it is served as if there were no store. vLLM's own prefix cache comes first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.sched.output import SchedulerOutput

from kp_core import ModelFingerprint, PackStore
from kp_core.errors import KnowledgePackError, ModelError
from kp_core.packs.entry import digest_of
from kp_core.rope import Rope
from kp_serve.blocks import PagedKV, layer_names
from kp_serve.rights import Rights, server_key
from kp_serve.stored import Part, Reader, StoredKV, named

logger = logging.getLogger(__name__)

_TRIED = 16  # Number of longest packs to look up; each lookup is one or two `stat` calls.
_ERRORS = (OSError, KnowledgePackError)
_THREADS = 2  # They read from disk, verify and copy; memory bandwidth is the limit.


_Parts: TypeAlias = tuple[tuple[Part, ...], tuple[str, ...]]
"""Consecutive parts of a prompt, and the namespaces that its request may read."""


@dataclass(frozen=True)
class Move:
    """Tokens `start:stop` of a request and their blocks. Their KV is loaded from `parts`, or stored as these."""

    parts: tuple[Part, ...]
    namespaces: tuple[str, ...]
    start: int
    stop: int
    blocks: tuple[int, ...]


class _Loading:
    """Loads the KV that one step of vLLM needs.

    `wait` blocks until a layer is in the cache, `finish` until all layers are. Neither raises if KV cannot be read:
    `failed` then holds the blocks, and vLLM fails their request. Only verified numbers are written.

    On the CPU, the reading threads also write. Elsewhere the model's thread writes, in the order of its stream, and
    before the step begins, as the step may be a recorded graph, which waits for nothing.
    """

    def __init__(self, moves: Sequence[Move], stored: StoredKV, cache: PagedKV) -> None:
        self.failed: set[int] = set()
        self._moves, self._cache, self._lock = moves, cache, threading.Lock()
        self._layers: list[list[tuple[Move, Future[list[tuple[Tensor, Tensor]]]]]] = [[] for _ in cache.layers]
        self._pool: ThreadPoolExecutor | None = None
        readable = [(move, readers) for move in moves if (readers := self._opened(move, stored))]
        if readable:
            self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "kp-load")
        for layer, jobs in enumerate(self._layers):
            for move, readers in readable:
                if self._pool is not None:
                    jobs.append((move, self._pool.submit(self._read, layer, move, readers)))
        if not cache.is_on_cpu:
            self.finish()

    def wait(self, layer: int) -> None:
        """Block until a layer is in the cache, for all moves of this step."""
        jobs, self._layers[layer] = self._layers[layer], []
        for move, job in jobs:
            try:
                parts = job.result()
                if not self._cache.is_on_cpu and self._is_wanted(move):
                    self._cache.write(layer, parts, move.blocks)
            except _ERRORS as error:
                self._fail(move, error)

    def finish(self) -> None:
        """Block until all layers are in the cache, and end the threads."""
        for layer in range(len(self._layers)):
            self.wait(layer)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            for move in filter(self._is_wanted, self._moves):
                logger.info("Loaded %d tokens of %s.", move.stop - move.start, named(move.parts))

    def _opened(self, move: Move, stored: StoredKV) -> list[Reader]:
        try:
            return stored.open(move.parts, move.namespaces, move.start, move.stop, len(self._cache.layers))
        except _ERRORS as error:
            self._fail(move, error)
            return []

    def _read(self, layer: int, move: Move, readers: Sequence[Reader]) -> list[tuple[Tensor, Tensor]]:
        if not self._is_wanted(move):
            return []
        parts = [reader(layer) for reader in readers]
        if self._cache.is_on_cpu:
            self._cache.write(layer, parts, move.blocks)
            return []
        return parts

    def _is_wanted(self, move: Move) -> bool:
        """Whether no layer of the move has failed so far."""
        with self._lock:
            return self.failed.isdisjoint(move.blocks)

    def _fail(self, move: Move, error: Exception) -> None:
        if self._is_wanted(move):
            logger.warning("%s cannot be loaded, and its request fails: %s", named(move.parts), error)
        with self._lock:
            self.failed.update(move.blocks)


@dataclass
class _Moves(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is no package of the checker's
    """What the worker loads and saves in one step."""

    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


class PackConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Loads the longest stored pack that a prompt begins with, and stores computed KV of packs that have none stored.

    vLLM makes one in its scheduler and one in each worker. At the start, raises `ModelError` if dtype, cache dtype or
    failure policy differ from the configured ones, and `ModelError` for caches that packs do not fit. If KV
    cannot be read, its request fails (`kv_load_failure_policy="fail"`); the entry is then deleted, and the next
    request computes it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        model = ModelFingerprint.from_dict(extra["identity"])
        _check(vllm_config, kv_cache_config, model)
        self._key = server_key()
        store = PackStore(extra["store"], seal=self._key if extra.get("sealed") else None)
        rope = extra.get("rope")
        self._stored = StoredKV(store, model, extra.get("compress", "lossless"), rope and Rope.from_dict(rope))
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._heads = vllm_config.model_config.get_total_num_kv_heads()
        self._cache: PagedKV | None = None
        self._places: dict[str, int] = {}
        self._loading: _Loading | None = None
        self._found: dict[str, tuple[_Parts, int]] = {}
        self._loads: list[Move] = []
        self._wanted: dict[str, _Parts] = {}
        self._failed: set[int] = set()
        self._unsafe: set[int] = set()

    # Called in the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ANN401
        """Number of tokens behind the computed ones whose KV the store has. `False`: the step itself loads them."""
        self._found.pop(request.request_id, None)
        self._wanted.pop(request.request_id, None)
        rights = Rights.read(request.kv_transfer_params, request.cache_salt, self._key)
        if rights is None:
            return 0, False
        ids = list(request.prompt_token_ids or ())
        # Model and token ids do not identify KV of a LoRA adapter or behind images.
        is_text = request.lora_request is None and not request.mm_features
        if rights.tokens:
            names = rights.namespaces if is_text and digest_of(ids) == rights.tokens else ()
            if rights.keeps and names and self._ranks == 1 and rights.keeps.stop == request.num_prompt_tokens:
                self._wanted[request.request_id] = (rights.keeps,), names
            if rights.begins:
                # If a part cannot be read, the request fails: plain KV under the salt of altered KV would give
                # wrong answers, now and later.
                return self._claim(request, (rights.begins, names), num_computed_tokens), False
        if not is_text or not ids or request.prompt_embeds is not None:
            return 0, False
        names = rights.namespaces
        try:
            for parts in islice(self._stored.find(ids, names), _TRIED):
                if self._stored.has(parts, names, num_computed_tokens):
                    return self._claim(request, (parts, names), num_computed_tokens), False
                if rights.save and self._ranks == 1:
                    self._wanted.setdefault(request.request_id, (parts, names))
        except _ERRORS as error:
            logger.warning("The store of packs cannot be asked; all is computed: %s", error)
        return 0, False

    def _claim(self, request: Any, run: _Parts, computed: int) -> int:  # noqa: ANN401
        # The last token is always computed, for its logits.
        stop: int = min(run[0][-1].stop, request.num_prompt_tokens - 1)
        if stop > computed:
            self._found[request.request_id] = (run, computed)
        return max(stop - computed, 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Remember the blocks that the found KV is loaded into."""
        loading = self._found.pop(request.request_id, None)
        if loading is None or num_external_tokens <= 0:
            return
        run, start = loading
        self._loads.append(self._move(run, start, start + num_external_tokens, blocks.get_block_ids()[0]))

    def _move(self, run: _Parts, start: int, stop: int, blocks: Sequence[int]) -> Move:
        size = self._vllm_config.cache_config.block_size
        return Move(*run, start, stop, tuple(blocks[start // size : -(-stop // size)]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What to load before this step, and to store after it."""
        moves, self._loads = _Moves(self._loads), []
        if self._wanted:
            cached = scheduler_output.scheduled_cached_reqs
            computed = {entry.req_id: entry.num_computed_tokens for entry in scheduler_output.scheduled_new_reqs}
            computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for name, scheduled in scheduler_output.num_scheduled_tokens.items():
                run = self._wanted.get(name)
                if run is not None and computed.get(name, 0) + scheduled >= run[0][-1].stop:
                    blocks = scheduler_output.kv_connector_block_state.get_block_ids(name)[0]
                    moves.saves.append(self._move(run, run[0][0].start, run[0][-1].stop, blocks))
                    del self._wanted[name]
        return moves

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401, ARG002
        """Forget the request; vLLM may free its blocks."""
        self._found.pop(request.request_id, None)
        self._wanted.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """As `request_finished`; there is only one group."""
        return self.request_finished(request, block_ids[0])

    # Called in the workers.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the paged cache of this rank."""
        rank = get_tensor_model_parallel_rank()
        # With fewer heads than ranks, several ranks share a head.
        first = rank * self._heads // self._ranks
        self._cache = PagedKV.of(kv_caches, first)
        self._places = {name: place for place, name in enumerate(layer_names(kv_caches))}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin to load the KV that this step needs; `get_block_ids_with_load_errors` reports failures."""
        self._end_loading()  # The loading of an aborted step.
        loads = self._get_connector_metadata().loads
        if not loads:
            return
        if self._cache is None:
            raise ModelError("vLLM has not said where its KV cache is.")
        self._loading = _Loading(loads, self._stored, self._cache)

    def _end_loading(self) -> None:
        if self._loading is not None:
            self._loading.finish()
            self._failed |= self._loading.failed
            self._loading = None

    def wait_for_save(self) -> None:
        """Store KV that this step computed for packs, unless blocks that it was computed from could not be loaded."""
        self._end_loading()
        for move in self._get_connector_metadata().saves:
            if not (self._failed | self._unsafe).isdisjoint(move.blocks):
                continue
            try:
                if self._cache is not None:
                    first = move.start % self._cache.block_size
                    kv = self._cache.read(move.blocks, first + move.stop - move.start)
                    self._stored.write(move.parts, kv.slice(first, kv.tokens))
                    logger.info("Stored %d tokens of %s.", move.stop - move.start, named(move.parts))
            except _ERRORS as error:
                logger.warning("The KV of %s was not stored: %s", named(move.parts), error)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be loaded; vLLM fails their requests."""
        failed, self._failed = self._failed, set()
        self._unsafe = failed
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until this layer is in the cache."""
        place = self._places.get(layer_name)
        # A layer without a KV cache of its own uses that of an earlier layer.
        if self._loading is not None and place is not None:
            self._loading.wait(place)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing: `wait_for_save` reads all layers after the step."""


def _check(config: VllmConfig, kv_cache_config: Any, model: ModelFingerprint) -> None:  # noqa: ANN401
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    checks: Mapping[str, bool] = {
        f"the model computes in {dtype}, and was named with {model.dtype}": dtype != model.dtype,
        f"its KV cache is {config.cache_config.cache_dtype}": config.cache_config.cache_dtype not in ("auto", dtype),
        f"its layers keep {len(groups)} kinds of KV": len(groups) != 1,
        "kv_load_failure_policy is not 'fail'": config.kv_transfer_config.kv_load_failure_policy != "fail",
    }
    faults = "; ".join(name for name, holds in checks.items() if holds)
    if len(groups) != 1:
        raise ModelError(f"{config.model_config.model} cannot use packs: {faults}.")
    if faults:
        raise ModelError(
            f"{config.model_config.model} cannot use packs as it was started: {faults}. "
            "Start it with `kp serve`, and let --dtype and the KV cache be the same."
        )
