"""Whether this machine reads KV faster than it computes it."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kp_core.engines.session import Session

__all__ = ["Rates", "measure_rates"]

_PROBE_TEXT = "The lighthouse keeper counts ships, and writes each of them into a long book.\n" * 32
_READ_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Rates:
    """What was measured of this machine: whether KV is read from the disk faster than it is computed.

    `prefill_tokens_per_s` of the model, `read_bytes_per_s` of the disk (where the system lets go of what it has in
    memory; else of memory), `bytes_per_token` of KV.
    """

    prefill_tokens_per_s: float
    read_bytes_per_s: float
    bytes_per_token: float

    @property
    def read_tokens_per_s(self) -> float:
        """Tokens whose KV the disk gives in a second."""
        return self.read_bytes_per_s / self.bytes_per_token

    @property
    def stores(self) -> bool:
        """Whether reading KV beats computing it."""
        return self.read_tokens_per_s > self.prefill_tokens_per_s


def measure_rates(engine: Session, folder: Path) -> Rates:
    """Build a pack of about 500 tokens twice and time the second; write 64 MiB to `folder`, read them, remove them."""
    engine.build_pack(_PROBE_TEXT)
    began = time.perf_counter()
    pack = engine.build_pack(_PROBE_TEXT)
    prefill = len(pack.prefix.token_ids + pack.token_ids) / (time.perf_counter() - began)
    return Rates(prefill, _read_bandwidth(folder), pack.nbytes / len(pack.token_ids))


def _read_bandwidth(folder: Path) -> float:
    path = folder / f"probe-{secrets.token_hex(8)}.tmp"
    try:
        with path.open("wb") as file:
            file.write(os.urandom(2**20) * (_READ_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            with suppress(AttributeError, OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = memoryview(bytearray(2**22))
            began = time.perf_counter()
            while file.readinto(buffer):
                pass
            return _READ_BYTES / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
