"""Speed of models in the shapes of real ones, with random weights made on the device.

- bandwidth: GB/s of a copy of 256 MB on the device, from and to pinned and pageable memory, and from disk; TFLOP/s of a
  matrix product in the dtype of the model.
- time to first token, seconds, behind a pack of `tokens` tokens: `plain`, one pass of plain transformers over the whole
  prompt; `text`, the same string through the engine with nothing reused; the pack in the memory of the device, in
  pinned host memory, where the prefix tree moved it, in a file in the system's cache (`cached`), and on disk (dropped
  from that cache); `floor`, one pass of plain transformers over the same last tokens behind a cache that holds the
  rest; `second`, the pack in memory before any pass was captured (the first request read it from disk). Medians of
  questions of different lengths, in a process that answered before. `text_bound` is 2 · parameters · tokens over the
  rate of the matrix product, `pinned_bound` the bytes of the pack and of the weights over the bandwidths, `disk_bound`
  the bytes of the pack over that of the disk. `peak_gb` is the most memory that was ever allocated.
- several packs: four packs behind each other, exact at first use and again, and composed.
- decoding: tokens a second behind a pack, of one answer and of eight at once on one pack, with captured graphs and
  `plain`, beside `model.generate`, and the same with a static cache, which transformers compiles on accelerators.
  `bound` reads the weights and the KV once per token.
- kernels: what computed attention. `math` is the slow path of torch, which no pass should need.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.disk import drop_from_page_cache
from benchmarks.floor import Floor
from benchmarks.gpu.report import Report, local, synchronise
from kp_core import KnowledgePack, PackStore, Session, load_engine
from kp_methods import SpliceComposer
from tests.kits import tiny_tokenizer

__all__ = ["LARGE", "SHAPES", "fitting", "run", "seconds_of"]

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_POSITIONS = {"max_position_embeddings": 40960}

SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-8b": lambda: Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, **_POSITIONS,
    ),
    "llama-3.1-8b": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rope_parameters=_LLAMA3_ROPE, **_POSITIONS,
    ),
    "smollm2": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, **_POSITIONS,
    ),
    "tiny": lambda: LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **_POSITIONS,
    ),
}  # fmt: skip
"""Configurations by name, the largest first."""
LARGE: Sequence[str] = ("qwen3-8b", "smollm2", "llama-3.1-8b")
"""The shapes that run without a choice, the most telling first."""

_LENGTHS = {"tiny": (256, 1024)}
_LONG = (1024, 4096, 16384, 32768)
_WARM, _REPEATS, _ROOM = 4, 5, 256
_PACKS, _PACK_TOKENS = 4, 1024
_USERS, _ANSWER, _ROUNDS = 8, 64, 4
_COPIED = 1 << 28  # Bytes of the copies that are timed.
_ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa|softmax", re.IGNORECASE)


def run(report: Report, shapes: Sequence[str]) -> None:
    """All rows of these shapes. Of one that does not fit into the memory, the next smaller is taken."""
    rates, taken = _Rates(), set[str]()
    try:
        with report.trying("bandwidth"):
            rates = _bandwidth(report)
        for asked in shapes:
            for shape in fitting(report, asked):
                if shape in taken or (taken and not report.has_time(0.75)):
                    break
                taken.add(shape)
                is_done = False
                with report.trying(shape), tempfile.TemporaryDirectory() as folder:
                    _Shape(report, shape, Path(folder), rates).measure()
                    is_done = True
                if report.device.type == "cuda":
                    torch.cuda.empty_cache()
                if is_done:
                    break
    finally:
        report.show("speed")


def fitting(report: Report, asked: str) -> Iterator[str]:
    """The shape `asked` and all smaller ones, as far as they fit into the memory that is free; says which do not."""
    for shape in itertools.dropwhile(lambda name: name != asked, SHAPES):
        needed, free = _needed_bytes(shape), _free_bytes(report.device)
        if needed <= free:
            yield shape
        else:
            missing = f"it needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            report.cannot(shape, f"{missing}; trying a smaller shape")


class _Rates:
    """Bytes a second on the device, from pinned memory and from disk, and operations a second; 0 if not known."""

    def __init__(self, device: float = 0.0, pinned: float = 0.0, product: float = 0.0, disk: float = 0.0) -> None:
        self.device, self.pinned, self.product, self.disk = device, pinned, product, disk


class _Shape:
    """One shape on the device: a model with random weights and an engine over it."""

    def __init__(self, report: Report, shape: str, folder: Path, rates: _Rates) -> None:
        self._report, self._name, self._folder, self._rates = report, shape, folder, rates
        self._dtype = torch.bfloat16 if report.device.type != "mps" else torch.float16
        self._model = _random_model(SHAPES[shape](), report.device, self._dtype)
        self._parameters = sum(weight.numel() for weight in self._model.parameters())
        # By default a CPU has no host memory, and a machine with little memory has none for the longest pack.
        self._engine: Session = load_engine(self._model, tokenizer=tiny_tokenizer(), host_cache_bytes=16 << 30)
        self._draw, self._questions = random.Random(0), itertools.count()  # noqa: S311 - no secrets
        self._lengths = _LENGTHS.get(shape, _LONG)

    def measure(self) -> None:
        """All rows, while there is time."""
        behind, text_s = self._lengths[min(1, len(self._lengths) - 1)], 0.0
        for tokens in self._lengths:
            # Attention grows with the square of the length.
            if text_s and not self._report.has_time(0.6, 8 * (_WARM + _REPEATS) * text_s):
                self._report.cannot(f"{self._name} at {tokens} tokens", "no time left")
                break
            with self._report.trying(f"{self._name} at {tokens} tokens"):
                text_s = self._first_tokens(tokens)
            if tokens == behind:
                for part in (self._decoding, self._kernels):
                    with self._report.trying(f"{self._name}: {part.__name__.strip('_')}"):
                        part(behind)
        if self._report.has_time(0.7):
            with self._report.trying(f"{self._name}: several packs"):
                self._several(min(_PACK_TOKENS, behind))

    def _pack(self, tokens: int) -> KnowledgePack:
        """A pack of about so many random tokens: each byte is a token."""
        return self._engine.build_pack("".join(self._draw.choices("abcdefgh ", k=tokens)) + "\n", compiled_for="system")

    def _ask(self, **options: Any) -> Any:  # noqa: ANN401 - a generation
        """One token behind another question each time, so that its KV is never at hand."""
        number = next(self._questions)
        asked = f"Question {number}? {'Why? ' * (number % 3)}"
        return self._engine.generate(asked, **{"max_tokens": 1, **options})

    def _first_tokens(self, tokens: int) -> float:
        pack = self._pack(tokens)
        if pack.kv is None:
            raise RuntimeError("Got a lazy pack.")
        handle, kv_bytes, count = str(PackStore(self._folder).put(pack)), pack.kv.nbytes, len(pack.token_ids)
        row: dict[str, Any] = {"shape": self._name, "tokens": tokens}
        prompts: list[Any] = []
        ways = self._ways(replace(pack, kv=None), handle)
        del pack
        for name, way in ways.items():
            warm, repeats = (1, 2) if name in ("cached", "disk") else (_WARM, _REPEATS)
            found = [way() for _ in range(warm + repeats)]
            reused = min(generation.usage.reused_tokens for generation in found[1:])
            if name != "text" and reused < count:
                raise RuntimeError(f"{name}: {reused} tokens reused; expected the {count} of the pack.")
            seconds = [generation.usage.ttft_s for generation in found]
            if name == "memory":
                row["second_s"], prompts = seconds[1], [generation.prompt for generation in found[warm:]]
            row[f"{name}_s"] = median(seconds[warm:])
        self._engine.clear_cache()
        row |= self._beside(prompts)
        rates, weights = self._rates, sum(weight.nbytes for weight in self._model.parameters())
        row["text_bound_s"] = 2 * self._parameters * tokens / rates.product if rates.product else None
        row["pinned_bound_s"] = kv_bytes / rates.pinned + weights / rates.device if rates.pinned else None
        row["disk_bound_s"] = kv_bytes / rates.disk if rates.disk else None
        row["disk/bound"] = row["disk_s"] * rates.disk / kv_bytes if rates.disk else None
        row |= {"memory/floor": row["memory_s"] / row["floor_s"], "text/pinned": row["text_s"] / row["pinned_s"]}
        row["plain/pinned"] = row["plain_s"] / row["pinned_s"]
        self._report.add("speed", row | {"kv_gb": kv_bytes / 1e9, "peak_gb": _peak_bytes(self._report.device) / 1e9})
        return float(row["text_s"])

    def _ways(self, lazy: KnowledgePack, handle: str) -> dict[str, Callable[[], Any]]:
        """Each way to a first token behind a pack: `lazy` without its KV, and its `handle` in the folder."""
        engine, view = local(self._engine), PackStore(self._folder).view("default")

        def memory() -> Any:  # noqa: ANN401
            return self._ask(packs=[handle], view=view)

        def pinned() -> Any:  # noqa: ANN401
            engine.tree.vacate()
            self._overwrite()
            return memory()

        def cached() -> Any:  # noqa: ANN401
            engine.tree.clear()
            self._overwrite()
            return self._ask(packs=[handle], view=PackStore(self._folder).view("default"))

        def disk() -> Any:  # noqa: ANN401
            drop_from_page_cache(self._folder)
            return cached()

        return {
            "text": lambda: self._ask(packs=[lazy], reuse=False),
            "memory": memory,
            "pinned": pinned,
            "cached": cached,
            "disk": disk,
        }

    def _overwrite(self) -> None:
        """Let idle buffers hold nothing that a request could use, as if others had used them."""
        for buffer in local(self._engine).pool._waiting:  # noqa: SLF001 - no user needs it
            buffer.note([])

    def _beside(self, prompts: Sequence[Any]) -> dict[str, float]:
        """Seconds of plain transformers for these prompts: for the whole, and behind a cache that holds the pack."""
        cut, ids = prompts[0].spans[0].stop, [list(prompt.token_ids) for prompt in prompts]
        with self._as_loaded():
            floor = Floor(self._model, ids[0][:cut], room=_ROOM, chunk_tokens=4096)
            behind = median(_twice(lambda tokens: floor.first_token(tokens[cut:])[1], ids))
            return {"floor_s": behind, "plain_s": median(_twice(self._plain, ids))}

    @contextmanager
    def _as_loaded(self) -> Iterator[None]:
        """Let the model have the attention that transformers takes by itself."""
        taken = self._model.config._attn_implementation  # noqa: SLF001 - transformers has no public name
        self._model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            self._model.set_attn_implementation(taken)

    @torch.inference_mode()
    def _plain(self, ids: Sequence[int]) -> float:
        """Seconds of one pass of the model alone over the tokens of a prompt."""
        began = time.perf_counter()
        batch = torch.tensor([list(ids)], device=self._report.device)
        int(self._model(input_ids=batch, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - began

    def _several(self, tokens: int) -> None:
        row: dict[str, Any] = {"shape": self._name, "packs": _PACKS, "tokens each": tokens}
        for _ in range(2):  # In the second round, the process has done all of it once.
            packs = [self._pack(tokens) for _ in range(_PACKS)]
            for name, options in {"exact": {}, "splice": {"composer": SpliceComposer()}}.items():
                self._engine.clear_cache()
                for use in ("first", "again"):
                    row[f"{name}_{use}_s"] = self._ask(packs=packs, **options).usage.ttft_s
        self._report.add("speed", row)

    def _decoding(self, behind: int) -> None:
        store = PackStore(self._folder)
        handle, view = str(store.put(self._pack(behind))), store.view("default")
        options: dict[str, Any] = {"packs": [handle], "view": view, "max_tokens": _ANSWER}
        bytes_read = sum(weight.nbytes for weight in self._model.parameters()) + behind * self._engine.bytes_per_token
        row: dict[str, Any] = {"shape": self._name, "behind": behind}
        model = local(self._engine).model
        replays, requests = model.replays, {number: f"User {number} asks." for number in range(_USERS)}
        row["graphs"] = replays is not None
        for name in ("", "plain_"):
            model.replays = None if name else replays
            self._ask(**options)
            began = time.perf_counter()
            found = self._ask(**options)
            seconds = time.perf_counter() - began - found.usage.ttft_s
            row[f"one_{name}tok_s"] = (found.usage.completion_tokens - 1) / seconds
            for _ in range(_ROUNDS if name == "" else 2):  # First with what each user asked not yet computed.
                began = time.perf_counter()
                answers = list(self._engine.generate_many(requests, at_once=_USERS, progress=False, **options))
                tokens = sum(answer.usage.completion_tokens for _, answer in answers)
                row[f"eight_{name}tok_s"] = tokens / (time.perf_counter() - began)
        model.replays = replays
        ids = torch.tensor([found.prompt.token_ids], device=self._report.device)
        row["generate_tok_s"] = row["static_tok_s"] = None
        with self._as_loaded():
            row["generate_tok_s"] = self._generated(ids)
        # Compiling takes a minute or two.
        if self._report.device.type == "cpu" or self._report.has_time(0.6, 150):
            with self._report.trying(f"{self._name}: generate with a static cache"), self._as_loaded():
                self._generated(ids, cache_implementation="static")
                row["static_tok_s"] = self._generated(ids, cache_implementation="static")
        row["bound_tok_s"] = self._rates.device / bytes_read if self._rates.device else None
        self._report.add("speed", row)

    def _generated(self, ids: torch.Tensor, **options: Any) -> float:  # noqa: ANN401 - of `generate`
        """Tokens a second of `model.generate` after the first token."""
        seconds = []
        for tokens in (1, 1 + _ANSWER):
            began = time.perf_counter()
            with torch.inference_mode():
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **options,
                )
            synchronise(self._report.device)
            seconds.append(time.perf_counter() - began)
        return _ANSWER / (seconds[1] - seconds[0])

    def _kernels(self, behind: int) -> None:
        pack = self._pack(behind)
        on_cpu, on_gpu = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        activities = [on_cpu, on_gpu] if self._report.device.type == "cuda" else [on_cpu]
        passes: dict[str, Callable[[], object]] = {
            "text": lambda: self._ask(packs=[pack], reuse=False),
            "pack": lambda: self._ask(packs=[pack]),
            "answer": lambda: self._ask(packs=[pack], max_tokens=4),
        }
        for name, act in passes.items():
            with torch.profiler.profile(activities=activities) as profile:
                act()
                synchronise(self._report.device)
            names = sorted({event.key for event in profile.key_averages() if _ATTENTION.search(event.key)})
            is_math = any("dot_product_attention_math" in kernel for kernel in names)
            used = "; ".join(kernel[:60] for kernel in names)
            self._report.add("speed", {"shape": self._name, "pass": name, "math": is_math, "kernels": used})


def _twice(seconds: Callable[[list[int]], float], prompts: Sequence[list[int]]) -> list[float]:
    """The seconds for each prompt the second time, since libraries plan for a length the first time."""
    for ids in prompts:
        seconds(ids)
    return list(map(seconds, prompts))


def _random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.eval()


def _needed_bytes(shape: str) -> int:
    """Bytes of weights and of three times the KV of the longest pack: in the tree, in a buffer, and in the floor."""
    config: Any = SHAPES[shape]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = sum(weight.nbytes for weight in model.parameters())
    return int(weights + 3 * token_bytes * max(_LENGTHS.get(shape, _LONG)))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _bandwidth(report: Report) -> _Rates:
    device, count = report.device, _COPIED // (16 if report.device.type == "cpu" else 1)
    here, there = (torch.ones(count, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(count, dtype=torch.uint8)
    row: dict[str, Any] = {"device_gb_s": 2 * count / seconds_of(lambda: there.copy_(here), device) / 1e9}
    row["pageable_gb_s"] = count / seconds_of(lambda: here.copy_(host), device) / 1e9
    row["pinned_gb_s"] = row["to_pinned_gb_s"] = None
    if device.type == "cuda":
        pinned = host.pin_memory()
        row["pinned_gb_s"] = count / seconds_of(lambda: here.copy_(pinned, non_blocking=True), device) / 1e9
        row["to_pinned_gb_s"] = count / seconds_of(lambda: pinned.copy_(here, non_blocking=True), device) / 1e9
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bytes.safetensors"
        path.write_bytes(host.numpy().tobytes())
        os.sync()
        drop_from_page_cache(Path(folder))
        began = time.perf_counter()
        path.read_bytes()
        row["disk_gb_s"] = count / (time.perf_counter() - began) / 1e9
    size = 512 if device.type == "cpu" else 8192
    dtype = torch.float16 if device.type == "mps" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = 2 * size**3 / seconds_of(lambda: left @ right, device)
    report.add("speed", row | {"product_tflops": product / 1e12})
    pinned_gb = row["pinned_gb_s"] or row["pageable_gb_s"]
    # What a step reads is not written, so the rate of reading counts.
    return _Rates(1e9 * row["device_gb_s"], 1e9 * pinned_gb, product, 1e9 * row["disk_gb_s"])


def seconds_of(act: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the least of several."""
    found = []
    for _ in range(6):
        synchronise(device)
        began = time.perf_counter()
        act()
        synchronise(device)
        found.append(time.perf_counter() - began)
    return min(found)
