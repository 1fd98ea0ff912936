"""What compiling takes on this machine, and whether it reads KV faster than it computes it."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kp_core.bundled import cache_directory
from kp_core.engines.session import Session
from kp_core.errors import PackError
from kp_core.packs.codec import Compression
from kp_core.packs.durable import replace_file
from kp_core.packs.file import encode_pack, read_pack
from kp_core.packs.pack import KnowledgePack

__all__ = ["MUCH_BYTES", "CompileCost", "Rates", "compile_cost", "known_rates", "measure_rates", "near_folder"]

_PROBE_TEXT = "The lighthouse keeper counts ships, and writes each of them into a long book.\n" * 32
_READ_BYTES = 64 * 2**20
_READS = 7
_LONGEST = 1.5  # How much longer a compressed pack may take to read.
_COUNTED, _TIMED = 256, 8
_WEEK_S = 7 * 24 * 3600
MUCH_BYTES = 10**9
"""A compile that fills more of the disk is warned of."""


@dataclass(frozen=True)
class Rates:
    """What was measured of this machine: whether KV is read from the disk faster than it is computed.

    `prefill_tokens_per_s` of the model, `read_bytes_per_s` of the disk (where the system lets go of what it has in
    memory; else of memory), `bytes_per_token` of KV.
    """

    prefill_tokens_per_s: float
    read_bytes_per_s: float
    bytes_per_token: float
    lossless_bytes: float = 1.0
    """Bytes of a losslessly compressed pack, over those of a plain one."""
    lossless_time: float = 1.0
    """Seconds to read it, over those for a plain one, digests checked; from memory where the system keeps files."""

    @property
    def read_tokens_per_s(self) -> float:
        """Tokens whose KV the disk gives in a second."""
        return self.read_bytes_per_s / self.bytes_per_token

    @property
    def compression(self) -> Compression:
        """How packs are best stored: without loss where reading takes at most half as long again, and beats computing.

        Where the disk is slower than `zstd`, compressed packs are read sooner as well.
        """
        saves = self.lossless_bytes < 1 and self.lossless_time <= _LONGEST
        return "lossless" if saves and self.read_tokens_per_s > self.prefill_tokens_per_s * _LONGEST else "none"

    @property
    def saved_s(self) -> float:
        """Seconds that a token saves which is read and not computed."""
        return 1 / self.prefill_tokens_per_s - 1 / self.read_tokens_per_s

    @property
    def stores(self) -> bool:
        """Whether reading KV beats computing it."""
        return self.read_tokens_per_s > self.prefill_tokens_per_s


def near_folder(store: object) -> Path:
    """Where the disk is measured for a store: in its folder; where packs are far away, among temporary files."""
    with suppress(PackError, AttributeError):
        return Path(store.path)  # type: ignore[attr-defined]
    return Path(tempfile.gettempdir())


def measure_rates(engine: Session, folder: Path) -> Rates:
    """Build a pack of about 500 tokens twice and time the second; store and read it plain and compressed.

    Writes 64 MiB to `folder` and reads them; removes all that it wrote.
    """
    engine.build_pack(_PROBE_TEXT[: engine.max_positions * 3 // 4])
    began = time.perf_counter()
    pack = engine.build_pack(_PROBE_TEXT[: engine.max_positions * 3 // 4])
    prefill = len(pack.prefix.token_ids + pack.token_ids) / (time.perf_counter() - began)
    with tempfile.TemporaryDirectory(".tmp", "probe-", folder) as scratch:
        path = Path(scratch) / "probe"
        sizes, times = zip(*(_measure(pack.compressed(each), path) for each in ("none", "lossless")), strict=True)
        read = _read_bandwidth(path)
    return Rates(prefill, read, pack.nbytes / len(pack.token_ids), sizes[1] / sizes[0], times[1] / times[0])


def known_rates(engine: Session, folder: Path) -> Rates:
    """What `measure_rates` gave for this model, this machine and the disk of `folder`, measured the first time.

    It is kept in the user's cache directory for a week, as a machine may have been busy; what cannot be read there is
    measured anew.
    """
    about = f"{engine.fingerprint.id} {folder.stat().st_dev} {platform.node()} {os.cpu_count()}"
    path = cache_directory() / f"rates-{blake2b(about.encode(), digest_size=8).hexdigest()}.json"
    with suppress(OSError, ValueError, TypeError):
        if time.time() - path.stat().st_mtime < _WEEK_S:
            return Rates(**{name: float(value) for name, value in json.loads(path.read_bytes()).items()})
    rates = measure_rates(engine, folder)
    with suppress(OSError):
        replace_file(path, [json.dumps(asdict(rates)).encode()])
    return rates


def _measure(pack: KnowledgePack, path: Path) -> tuple[int, float]:
    """Bytes of a pack file, and the least seconds of several to read it."""
    path.write_bytes(b"".join(encode_pack(pack).chunks()))
    took = []
    for _ in range(_READS):
        began = time.perf_counter()
        read_pack(np.fromfile(path, np.uint8).data)
        took.append(time.perf_counter() - began)
    return path.stat().st_size, min(took)


@dataclass(frozen=True)
class CompileCost:
    """What compiling texts takes: packs, their tokens, the bytes of their files, and seconds of computing."""

    packs: int
    tokens: int
    nbytes: int
    seconds: float


def compile_cost(
    texts: Sequence[str], engine: Session, *, lazy: bool = False, compress: Compression = "none"
) -> CompileCost:
    """What compiling `texts` will take, by the tokens of up to 256 of them, and by compiling 8 of these."""
    if not texts:
        return CompileCost(0, 0, 0, 0.0)
    sample = texts[:: -(-len(texts) // _COUNTED)]
    scale = sum(map(len, texts)) / sum(map(len, sample))
    counted = list(engine.build_packs(sample, lazy=True, progress=False, on_short=lambda *_: None))
    tokens = round(scale * sum(len(pack.token_ids) for pack in counted))
    nbytes = scale * sum(encode_pack(pack).nbytes + len(pack.text.encode()) for pack in counted)
    # The first pack of a process is slow: kernels load, and what stands before every pack is computed once.
    timed = [pack.text for pack in counted[:: max(1, len(counted) // _TIMED)]]
    list(engine.build_packs(timed[:1], lazy=lazy, progress=False))
    began = time.perf_counter()
    made = list(engine.build_packs(timed, lazy=lazy, compress=compress, progress=False))
    seconds = (time.perf_counter() - began) * sum(map(len, texts)) / max(1, sum(map(len, timed)))
    stored = sum(encode_pack(pack).nbytes - encode_pack(pack.without_kv()).nbytes for pack in made)
    kv = stored / max(1, sum(len(pack.token_ids) for pack in made))
    return CompileCost(len(texts), tokens, round(nbytes + kv * tokens), seconds)


def _read_bandwidth(path: Path) -> float:
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
