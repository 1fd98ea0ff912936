"""llama.cpp through its C interface: one model with one context, whose cells all sequences share."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kp_core.bundled import needing
from kp_core.engines.local.buffer import memory_bytes
from kp_core.errors import MissingDependencyError, ModelError
from kp_llama.state import BUILDS, TYPES

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MOST_SEQUENCES = 30
"""Sequences for requests; the context has a few more, for those that last for one call."""
_NO_CELL = 1  # What `llama_decode` returns if no cells are free.
_ERROR = 4  # The level of errors in the log of llama.cpp.

Tokens: TypeAlias = tuple[int, int, Sequence[int]]
"""A sequence, the position of its first new token, and its new tokens."""


class Context:
    """A GGUF file, loaded. `cells` are the tokens that all sequences together may have; it is rounded up.

    `dtype` is that of keys and values. `threads` compute; `batch_tokens` are the most of one `decode`. Its methods must
    be called through `call`, so that one thread does everything: llama.cpp allows one call at a time, and OpenMP keeps
    worker threads for each thread that ever computed.

    Raises `MissingDependencyError` without llama-cpp-python, and `ModelError` for another release than those in
    `BUILDS`, for a file that cannot be loaded, and for a context that does not fit into memory.
    """

    def __init__(  # noqa: PLR0913 - one keyword per setting
        self, path: Path, *, cells: int, dtype: torch.dtype, threads: int, batch_tokens: int, gpu_layers: int = -1
    ) -> None:
        with needing("Running a model in llama.cpp needs llama-cpp-python", "llama"):
            from llama_cpp import llama_cpp
        if (release := version("llama-cpp-python")) not in BUILDS:
            raise MissingDependencyError(
                f"llama-cpp-python {release} is installed; expected {' or '.join(BUILDS)}, whose state of a sequence "
                'this release can read: `pip install "knowledge-packs[llama]"`.'
            )
        self.lib: Any = llama_cpp
        """The functions of the C interface."""
        self.release, self._staging = release, np.empty(0, np.uint8)
        self._thread = f"kp-llama-{id(self)}_0"
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=self._thread.removesuffix("_0"))
        self.call(self._load, path, gpu_layers)
        self.call(self._begin, cells, dtype, threads, batch_tokens)

    def call(self, act: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What `act` returns, in the thread of llama.cpp. It runs to its end, also if the caller is interrupted."""
        if threading.current_thread().name == self._thread:  # Garbage collection may close a stream there.
            return act(*args, **options)
        return self._worker.submit(act, *args, **options).result()

    def _load(self, path: Path, gpu_layers: int) -> None:
        lib = self.lib
        lib.llama_log_set(_log, None)
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = gpu_layers
        self.model = lib.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise _failed(f"Could not load {str(path)!r}, which llama.cpp expects to be a GGUF file of a model")
        weakref.finalize(self, lib.llama_model_free, self.model)
        kinds = {
            "recurrent layers": lib.llama_model_is_recurrent(self.model) or lib.llama_model_is_hybrid(self.model),
            "sliding windows": lib.llama_model_n_swa(self.model) > 0,
            "an encoder": lib.llama_model_has_encoder(self.model),
        }
        if kind := next((name for name, has in kinds.items() if has), None):
            raise ModelError(
                f"{path.name} has {kind}, whose state llama.cpp gives only as a whole, so that no pack can be cut out "
                "of it. With engine='hf', transformers runs it."
            )
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocabulary = int(lib.llama_vocab_n_tokens(self.vocab))
        """Length of the logits."""

    def _begin(self, cells: int, dtype: torch.dtype, threads: int, batch_tokens: int) -> None:
        lib, options = self.lib, self.lib.llama_context_default_params()
        width = lib.llama_model_n_embd(self.model) * lib.llama_model_n_head_kv(self.model)
        values = 2 * lib.llama_model_n_layer(self.model) * width // max(1, lib.llama_model_n_head(self.model))
        if (size := cells * values * dtype.itemsize) > memory_bytes(torch.device("cpu")):  # llama.cpp would try.
            raise ModelError(f"The KV of {cells:,} tokens takes about {size / 1e9:,.0f} GB. Load with fewer `cells`.")
        options.n_ctx, options.n_batch, options.n_ubatch = cells, batch_tokens, batch_tokens
        options.n_seq_max, options.kv_unified = MOST_SEQUENCES + 2, True
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = TYPES[dtype]
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            raise _failed(f"llama.cpp made no context of {cells:,} tokens")
        weakref.finalize(self, lib.llama_free, self.context)
        self.memory = lib.llama_get_memory(self.context)
        self.cells, self.batch_tokens = int(lib.llama_n_ctx(self.context)), int(lib.llama_n_batch(self.context))
        self._batch = lib.llama_batch_init(self.batch_tokens, 0, 1)
        self.free_ids = list(range(MOST_SEQUENCES))
        """Sequences that no buffer has."""
        self._empty_bytes = lib.llama_state_get_size(self.context)

    def metadata(self, name: str) -> str | None:
        """The value of that name in the file, of at most 255 characters; `None` if there is none."""
        text = ctypes.create_string_buffer(256)
        size = self.lib.llama_model_meta_val_str(self.model, name.encode(), text, len(text))
        return text.value.decode(errors="replace") if size >= 0 else None

    def decode(
        self, rows: Sequence[Tokens], outputs: Literal["none", "last", "all"] = "last"
    ) -> npt.NDArray[np.float32]:
        """Compute tokens of several sequences in one pass. Returns logits `(outputs, vocabulary)`, of each row in turn.

        Raises `ModelError` without free cells, and if llama.cpp fails; then no row has new tokens.
        """
        batch, indices = self._batch, list[int]()
        batch.n_tokens = 0
        for sequence, start, ids in rows:
            for position, token in enumerate(ids, start):
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, position, 1, sequence
                batch.logits[at] = outputs == "all" or (outputs == "last" and position == start + len(ids) - 1)
                indices += [at] if batch.logits[at] else []
                batch.n_tokens += 1
        status = self.lib.llama_decode(self.context, batch)
        if status:
            for sequence, start, _ in rows:
                self.remove(sequence, start)
            if status == _NO_CELL:
                raise ModelError(f"The {self.cells:,} cells of the context are taken. Load with more `cells`.")
            raise _failed(f"llama.cpp failed to compute {batch.n_tokens} tokens ({status})")
        logits = np.empty((len(indices), self.vocabulary), np.float32)
        for row, index in zip(logits, indices, strict=True):
            source = self.lib.llama_get_logits_ith(self.context, index)
            ctypes.memmove(row.ctypes.data, source, row.nbytes)
        return logits

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """Make the tokens at the positions `start:stop` of one sequence tokens of another one too; copies no KV."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, start, stop)

    def remove(self, sequence: int, start: int = 0, stop: int = -1) -> None:
        """Drop the tokens at the positions `start:stop`."""
        self.lib.llama_memory_seq_rm(self.memory, sequence, start, stop)

    def state(self, sequence: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The state of a sequence as if it had these positions alone: bytes, `(size,)`."""
        lib, alone = self.lib, MOST_SEQUENCES
        self.copy(sequence, alone, start, stop)
        try:
            state = np.empty(lib.llama_state_seq_get_size(self.context, alone), np.uint8)
            if lib.llama_state_seq_get_data(self.context, _address(state), len(state), alone) != len(state):
                raise _failed("llama.cpp gave no state of a sequence")
        finally:
            self.remove(alone)
        return state

    def restore(self, sequence: int, size: int, write: Callable[[npt.NDArray[np.uint8]], object]) -> None:
        """Add the tokens of a state of `size` bytes to a sequence; `write` writes it.

        Raises `ModelError` without free cells.
        """
        alone = MOST_SEQUENCES
        if len(self._staging) < size:  # Used again, since new memory costs more than the copy.
            self._staging = np.empty(size, np.uint8)
        write(state := self._staging[:size])
        if self.lib.llama_state_seq_set_data(self.context, _address(state), len(state), alone) != len(state):
            self.remove(alone)
            raise ModelError(f"llama.cpp took no state of {len(state):,} bytes: its cells are taken.")
        self.copy(alone, sequence)
        self.remove(alone)

    def used_cells(self, cell_bytes: int) -> int:
        """How many cells have tokens of any sequence; at most one in a hundred too many.

        `cell_bytes` is the size of the KV of a token. llama.cpp tells the size of the state of all sequences.
        """
        size = int(self.lib.llama_state_get_size(self.context)) - self._empty_bytes
        return -(-size // cell_bytes) if size else 0


_errors = deque[str](maxlen=4)  # The last ones that llama.cpp logged. It has one log for all models.


def _note(level: int, text: bytes, _data: object) -> None:
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        _errors.append(line)
    logger.debug("%s", line)


_log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_note)


def _failed(what: str) -> ModelError:
    reasons = [*_errors]
    _errors.clear()
    return ModelError(f"{what}: {' '.join(reasons) or 'it gave no reason'}.")


def _address(state: npt.NDArray[np.uint8]) -> Any:  # noqa: ANN401
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
