"""Tiny models of every kind of cache on the device: from packs as from the plain string, from the device as from a CPU.

One row for each model and dtype, one column for each way to an answer, compared with the answer to the plain string in
the same engine with nothing reused:

- `memory`, `host`, `disk`: the pack from the prefix tree on the device, from host memory, and from its file.
- `replay`: the pack, after passes as long as the question, and steps of decoding, were recorded.
- `turn`: a second turn behind a decoded answer.
- `batch`: four at once, each compared with itself alone.
- `select`: one of two packs, chosen by attention, compared with the text of that one.
- `steered`: a steered prompt that is read from the tree, compared with the same computed anew.
- `generate`: plain `model.generate` on the device. `cpu`: plain transformers in float32 on the CPU; logits alone.
- composers: `right`, if all rules of `tests.kits.check_composer` hold.

`bits`: the same logits, bit for bit, and the same tokens. A number: the same tokens, and the relative error of the
first logits. `DIFFERS`: other tokens in float32, or an error above 1e-4 in float32 and 0.1 elsewhere. In shorter dtypes
other tokens are rounding, marked `~`: reused KV and computed KV round differently (`lacks["bitwise"]`).
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.report import Report, local
from kp_core import ExactComposer, Generation, PackStore, Session, load_engine
from kp_core.engines.hf.replay import PLAIN_PASSES
from kp_core.errors import ModelError, UnsupportedRequestError
from kp_methods import SelectComposer, SpliceComposer
from tests.kits import ARCHITECTURES, NaiveComposer, check_composer, tiny_model, tiny_tokenizer
from tests.parity.families import QUICK, model_of

__all__ = ["run"]

_KINDS = ("llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma3n_text", "llama4_text")
"""One of each kind: plain, experts, windows, latents, states, sinks, shared KV, chunks. The others follow."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENS, _AT_ONCE = 6, 4
_FACTS = "".join(f"Pier {n} has {3 * n + 2} boats, and pier {n + 9} has {n * n + 1}. " for n in range(1, 5)) + "\n"
"""Longer than the windows of the tiny models."""
_OTHER, _ASKED = "Quay 5 has no boats at all.\n", "How many boats?"
_PAIRS = [("I am glad.", "I am sad."), ("It is warm.", "It is cold.")]
_COMPOSERS = {"exact": ExactComposer(), "naive": NaiveComposer(), "splice": SpliceComposer()}
_COLUMNS = ("memory", "host", "disk", "replay", "turn", "batch", "select", "steered", "generate", "cpu", *_COMPOSERS)


def run(report: Report) -> None:
    """All rows, the most telling first, while there is time; one of each kind in float32 whatever the time.

    On a CPU, one of each kind in float32, and the first in other dtypes.
    """
    kinds = list(dict.fromkeys((*_KINDS, *ARCHITECTURES, *QUICK)))
    parts = kinds[: len(_KINDS)], kinds[len(_KINDS) :]
    wanted = [(kind, dtype) for part in parts for dtype in _DTYPES for kind in part]
    if report.device.type == "cpu":  # There, tests compare the others.
        wanted = [*wanted[: len(_KINDS)], *((_KINDS[0], dtype) for dtype in _DTYPES if dtype != "float32")]
    try:
        for number, (kind, dtype) in enumerate(wanted):
            if not report.has_time(0.35) and number >= len(_KINDS):
                report.cannot(f"parity of {len(wanted) - number} more of {len(wanted)} models", "no time left")
                break
            with report.trying(f"parity of {kind} in {dtype}"):
                report.add("parity", {"model": kind, "dtype": dtype, **_row(kind, _DTYPES[dtype], report.device)})
    finally:
        rows = report.figures.get("parity", [])
        bad = [f"{row['model']} {row['dtype']} {name}" for row in rows for name in row if "DIFFERS" in str(row[name])]
        report.figures["parity_differs"] = bad
        report.show("parity", [f"{len(rows)} models, {len(bad)} differences: {', '.join(bad) or 'none'}"])


def _row(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    model = tiny_model(kind) if kind in ARCHITECTURES else model_of(kind)
    on_cpu = copy.deepcopy(model)
    model = (model if dtype == torch.float32 else _converted(kind, dtype)).to(device)
    plain = copy.deepcopy(model)  # Some models change their buffers as they run.
    options: dict[str, Any] = {"chunk_tokens": 48, "cache_bytes": 50_000_000, "host_cache_bytes": 50_000_000}
    engine = load_engine(model, tokenizer=tiny_tokenizer(), **options)
    with tempfile.TemporaryDirectory() as folder:
        answers = _Answers(engine, PackStore(folder), folder)
        found: dict[str, Any] = {"bitwise": "bitwise" in engine.supports}
        ways: dict[str, Callable[[], str]] = {
            **{name: lambda way=way: answers.compared(*way()) for name, way in answers.ways().items()},
            "generate": lambda: _generated(plain, answers.text()),
            "cpu": lambda: _on_cpu(on_cpu, answers.text(), dtype),
            **{name: lambda made=made: _checked(made, engine) for name, made in _COMPOSERS.items()},
        }
        for name in _COLUMNS:
            try:
                found[name] = ways[name]()
            except UnsupportedRequestError:
                found[name] = None
    return found


def _converted(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    if kind not in ARCHITECTURES:
        return model_of(kind, dtype)
    model = tiny_model(kind, dtype)
    # Random numbers drawn in a shorter dtype may be other numbers.
    model.load_state_dict(tiny_model(kind).state_dict())
    return model


class _Answers:
    """Pairs of answers that must agree."""

    def __init__(self, engine: Session, store: PackStore, folder: str) -> None:
        self._engine, self._store, self._folder = engine, store, folder
        self._handle = store.put(engine.build_pack(_FACTS))

    def text(self, asked: str = _ASKED) -> Generation:
        """The answer to the plain string, with nothing reused."""
        return self._engine.generate(f"{_FACTS}\n{asked}", max_tokens=_TOKENS, reuse=False)

    def ways(self) -> dict[str, Callable[[], tuple[Any, Any]]]:
        """Each way to an answer, with what it is compared with."""
        return {name: getattr(self, f"_{name}") for name in _COLUMNS[:8]}

    def compared(self, found: Any, expected: Any) -> str:  # noqa: ANN401 - generations, or lists of them
        """How two answers compare, or the worst of several."""
        pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
        told = [_compared(one, other) for one, other in pairs]
        return max(told, key=lambda said: (said != "bits", "DIFFERS" in said))

    def _memory(self) -> tuple[Generation, Generation]:
        return self._pack(self._store), self.text()

    def _host(self) -> tuple[Generation, Generation]:
        self._pack(self._store)
        local(self._engine).free_memory()
        found = self._pack(self._store)
        if found.usage.computed_tokens:
            raise RuntimeError(f"Got {found.usage}; expected nothing to be computed.")
        return found, self.text()

    def _disk(self) -> tuple[Generation, Generation]:
        self._engine.clear_cache()
        return self._pack(PackStore(self._folder)), self.text()

    def _pack(self, store: PackStore) -> Generation:
        view = store.view("default")
        found = self._engine.generate(f"{self._handle}\n{_ASKED}", view=view, max_tokens=_TOKENS)
        if found.usage.reused_tokens < found.usage.pack_tokens:
            raise RuntimeError(f"Got {found.usage}; expected the KV of the pack to be read.")
        return found

    def _replay(self) -> tuple[Generation, Generation]:
        if local(self._engine).model.replays is None:
            raise UnsupportedRequestError("Its passes are not recorded.")
        view, asked = self._store.view("default"), [f"{_ASKED} {number}" for number in range(PLAIN_PASSES + 2)]
        for text in asked:
            found = self._engine.generate(f"{self._handle}\n{text}", view=view, max_tokens=_TOKENS)
        return found, self.text(asked[-1])

    def _turn(self) -> tuple[Generation, Generation]:
        first = self._pack(self._store)
        answered = {"role": "assistant", "content": first.text}
        turns, texts = (
            [{"role": "user", "content": said}, answered, {"role": "user", "content": "And which pier?"}]
            for said in (f"{self._handle}\n{_ASKED}", f"{_FACTS}\n{_ASKED}")
        )
        found = self._engine.generate(turns, view=self._store.view("default"), max_tokens=_TOKENS)
        return found, self._engine.generate(texts, max_tokens=_TOKENS, reuse=False)

    def _batch(self) -> tuple[list[Generation], list[Generation]]:
        asked = [f"{_ASKED} {'Say more. ' * number}" for number in range(_AT_ONCE)]
        requests = {number: f"{self._handle}\n{question}" for number, question in enumerate(asked)}
        options: dict[str, Any] = {"view": self._store.view("default"), "max_tokens": _TOKENS, "progress": False}
        found = dict(self._engine.generate_many(requests, at_once=_AT_ONCE, **options))
        return [found[number] for number in requests], list(map(self.text, asked))

    def _select(self) -> tuple[Generation, Generation]:
        packs = [self._engine.build_pack(text, compiled_for="system") for text in (_FACTS, _OTHER)]
        options: dict[str, Any] = {"composer": SelectComposer(packs=1), "max_tokens": _TOKENS}
        found = self._engine.generate(_ASKED, packs=packs, **options)
        read = [span.pack for span in found.prompt.spans]
        return found, self._engine.generate(_ASKED, packs=read, max_tokens=_TOKENS, reuse=False)

    def _steered(self) -> tuple[Generation, Generation]:
        steering = self._engine.make_steering(_PAIRS, progress=False)
        options: dict[str, Any] = {"steering": (steering, 2.0), "scope": "prompt", "max_tokens": _TOKENS}
        expected = self._engine.generate(_ASKED, reuse=False, **options)
        self._engine.generate(_ASKED, **options)
        return self._engine.generate(_ASKED, **options), expected


def _compared(found: Generation, expected: Generation) -> str:
    if found.prompt.token_ids != expected.prompt.token_ids:
        return "DIFFERS in the prompt"
    if found.logits is None or expected.logits is None:
        raise RuntimeError("Got an answer without logits.")
    is_same = found.token_ids == expected.token_ids
    if is_same and torch.equal(found.logits, expected.logits):
        return "bits"
    return _told(found.logits, expected.logits, is_same=is_same)


def _told(found: Tensor, expected: Tensor, *, is_same: bool) -> str:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    is_precise = found.dtype == torch.float32
    if not error <= (1e-4 if is_precise else 0.1):
        return f"DIFFERS by {error:.1e}"
    if not is_same and is_precise:
        return f"DIFFERS in tokens, {error:.0e}"
    return f"{error:.0e}" if is_same else f"~{error:.0e}"


def _generated(model: PreTrainedModel, text: Generation) -> str:
    ids = torch.tensor([text.prompt.token_ids], device=model.device)
    with torch.inference_mode():
        output: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = tuple(output.sequences[0, ids.shape[1] :].tolist())
    if text.logits is None:
        raise RuntimeError("Got an answer without logits.")
    return _told(text.logits, output.logits[0][0].to(text.logits.dtype), is_same=tokens == text.token_ids)


def _on_cpu(model: PreTrainedModel, text: Generation, dtype: torch.dtype) -> str:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([text.prompt.token_ids])).logits[0, -1]
    if text.logits is None:
        raise RuntimeError("Got an answer without logits.")
    found = text.logits.cpu().float()
    if dtype == torch.float32:
        return _told(found, logits, is_same=True)
    # Weights of a shorter dtype are rounded, so an error of their size is no difference.
    return f"{float((found - logits).norm() / logits.norm()):.0e}"


def _checked(composer: Any, engine: Session) -> str | None:  # noqa: ANN401 - any composer
    try:
        check_composer(composer, engine)
    except AssertionError as broken:
        return f"DIFFERS: {broken}"
    except (UnsupportedRequestError, ModelError):
        return None
    return "right"
