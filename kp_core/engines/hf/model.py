"""Runs a Hugging Face causal language model for the engine: tokens in, KV and logits out."""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kp_core.engines.hf import attention
from kp_core.engines.hf.attention import Sees, attend
from kp_core.engines.hf.bitwise import why_not_bitwise
from kp_core.engines.hf.cache import cache_of, measured_shape
from kp_core.engines.hf.kinds import kind_of, narrowed, positions_of, rope_parameters
from kp_core.engines.hf.packed import own_view, pack_weights
from kp_core.engines.hf.placed import forward_among, forward_at, forward_soft, rope_of
from kp_core.engines.hf.rows import Rows, run_ragged
from kp_core.engines.hf.sampling import Sampler
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.engines.local.grammar import Constraint
from kp_core.engines.local.scheduler import let_go
from kp_core.errors import UnsupportedModelError, UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.plan import Sampling
from kp_core.rope import Rope

__all__ = ["CausalModel"]

logger = logging.getLogger(__name__)

_NO_ROWS = "its attention is its own, and is not told which tokens belong to which answer"
_PROBE = 8
"""Tokens of the forward pass that measures the shape of the cache."""
_NARROW = _PROBE - 3
"""Tokens of a sliding window during a probe."""
_PACE_TOKENS = 128
"""Tokens of the forward pass that is timed."""


class CausalModel:
    """Runs the forward passes of a Hugging Face causal LM over KV buffers.

    With `keep_attention`, the model keeps the attention it was loaded with, which rounds differently.

    Raises `UnsupportedModelError`, with the reason, for architectures that cannot continue from their cache.
    """

    def __init__(self, model: PreTrainedModel, *, keep_attention: bool = False) -> None:
        self.kind = kind_of(model.config)
        """What its layers cache."""
        self._model = own_view(model).eval()
        self.config: Any = self._model.config
        """The architecture's configuration."""
        self._text: Any = self.config.get_text_config(decoder=True)
        self.device: torch.device = self._model.device
        """Device of the input token ids."""
        one_pass = partial(self._model.base_model, input_ids=self._probe_ids(), use_cache=False)
        self._packed = pack_weights(self._model, one_pass)
        self.vocabulary = int(self._model.get_output_embeddings().weight.shape[0])
        """Length of the logits, which may be longer than the tokenizer's vocabulary."""
        parameters = inspect.signature(self._model.forward).parameters
        self._takes_cache = "cache_params" if "cache_params" in parameters else "past_key_values"
        # Some models with different layers count positions from 0 in each pass.
        self._takes_positions = self.kind.is_recurrent and "position_ids" in parameters
        self.keeps_logits = "logits_to_keep" in parameters
        """Whether a pass can return the logits of some tokens alone."""
        self.shape = measured_shape(self._model, self.kind.windows, _PROBE, self._takes_cache)
        self.attends = False
        """Whether its attention is tiled (`hf.attention`)."""
        self.engine = "local"
        """Name of the engine in the fingerprint."""
        if keep_attention:
            self.engine += f"/{self.config._attn_implementation}"  # noqa: SLF001 - transformers has no public name
        else:
            self._install_attention()
        if self.kind.is_recurrent:
            self._check_states()
        self.lacks = self._found_lacks()
        """Capabilities that this model does not allow, each with the reason."""
        let_go()  # Other threads may run the requests.

    def renew(self) -> None:
        """Read the current weights, and probe again which capabilities the model lacks."""
        buffer = KVBuffer(self.shape, 2 * _PROBE)
        self._packed = pack_weights(self._model, partial(self.forward, self._probe_ids(), buffer, logits=False))
        self.lacks = self._found_lacks()

    def _found_lacks(self) -> dict[str, str]:
        lacks = dict(self.kind.lacks)
        if self.shape.devices:
            lacks = {"compose": "its layers are on several devices", **lacks}
        if "batch" not in lacks and not self.batches:
            lacks["batch"] = _NO_ROWS
        if why := why_not_bitwise(self, self._packed):
            lacks["bitwise"] = why
        return lacks

    @property
    def max_positions(self) -> int:
        """See `positions_of`."""
        return positions_of(self._text)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn, from the configuration and the generation configuration."""
        tokens: set[int] = set()
        for config in (self.config, self._text, getattr(self._model, "generation_config", None)):
            token = getattr(config, "eos_token_id", None)
            tokens.update([token] if isinstance(token, int) else token or [])
        return frozenset(tokens)

    @torch.inference_mode()
    def forward(self, ids: Tensor, buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Run `ids` of shape `(1, new)` behind the tokens in `buffer`, and write their KV there.

        Returns the logits at the last token, `(1, vocabulary)`. Without `logits`, skips the head and returns `None`.
        """
        if not logits:
            self._run(self._model.base_model, ids, buffer)
            return None
        options: dict[str, Any] = {"logits_to_keep": 1} if self.keeps_logits else {}
        last_logits: Tensor = self._run(self._model, ids, buffer, **options).logits[:, -1]
        return last_logits.clone()

    @torch.inference_mode()
    def forward_all(self, ids: Tensor, buffer: KVBuffer) -> Tensor:
        """As `forward`, but returns the logits at every token, `(new, vocabulary)`."""
        logits: Tensor = self._run(self._model, ids, buffer).logits[0]
        return logits.clone()

    def _run(self, model: Any, ids: Tensor, buffer: KVBuffer, **options: Any) -> Any:  # noqa: ANN401 - as transformers
        """A forward pass of the model, or of its base, behind the tokens in `buffer`."""
        start, stop = buffer.length, buffer.length + ids.shape[1]
        cache = cache_of(buffer, self.kind.windows, in_tiles=self.attends)
        arguments: dict[str, Any] = {self._takes_cache: cache, **self._attention(range(start, stop), buffer), **options}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, stop, device=ids.device).expand(ids.shape)
        output = model(input_ids=ids, use_cache=True, **arguments)
        buffer.passed(stop)
        return output

    def _attention(self, positions: Sequence[int], buffer: KVBuffer) -> dict[str, Any]:
        """Arguments of a pass that tell tiled attention how its tokens attend; none if the model's own is used."""
        if not self.attends:
            return {}
        buffer.blank(max(buffer.length, positions[-1] + 1))
        sees = self.sees

        def attend_here(  # noqa: PLR0913 - the inputs of attention
            layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
        ) -> Tensor:
            return attend(query, key, value, positions, scale, sees[layer], sinks)

        return {"kp_attend": attend_here}

    @property
    def passes(self) -> str:
        """How passes are computed, as far as the bits depend on it; part of the fingerprint."""
        if "bitwise" in self.lacks:
            return "any"
        version, cpu = torch.__version__.partition("+")[0], torch.cpu
        units = {"bf16": cpu._is_avx512_bf16_supported(), "amx": cpu._is_amx_tile_supported()}  # noqa: SLF001
        names = (
            torch.backends.cpu.get_cpu_capability(),
            *(name for name, is_supported in units.items() if is_supported),
        )
        return f"tiles of {TILE}, torch {version}, {' '.join(names)}"

    @property
    def sees(self) -> list[Sees]:
        """What a token sees in each layer."""
        return [Sees(window or 0, self.kind.is_chunked) for window in self.kind.windows]

    @cached_property
    def batches(self) -> bool:
        """Whether several sequences can decode in one pass: attention is tiled, and the logits of a probe agree.

        First read when two answers wait.
        """
        if not self._is_ours("plain", "windows") or self.shape.devices:
            return False
        with self._narrowed():
            return self._rows_agree()

    def _is_ours(self, *kinds: str) -> bool:
        """Whether attention is tiled, and the cache is one of these `kinds`."""
        return self.attends and self.kind.name in kinds

    def _rows_agree(self) -> bool:
        buffers = [KVBuffer(self.shape, 2 * _PROBE) for _ in range(2)]
        for row, buffer in enumerate(buffers):
            self.forward(self._probe_ids()[:, : _PROBE + row], buffer, logits=False)
        token = int(self._probe_ids()[0, -1])
        tokens = [[token], [token, token]]
        try:
            steps = [self.rows(buffers)([token, token]), self.ragged(buffers, tokens)]
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            logger.info("%s decodes sequences one by one: %s", self.config.model_type, error)
            return False
        expected = []
        for row, buffer in enumerate(buffers):
            buffer.truncate(_PROBE + row)
        for ids in ([[token], [token]], tokens):
            pairs = zip(ids, buffers, strict=True)
            expected += [self.forward(torch.tensor([row_ids], device=self.device), buffer) for row_ids, buffer in pairs]
        return self._agree(
            torch.cat(steps).float(), torch.cat([logits for logits in expected if logits is not None]).float()
        )

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """A function that decodes one token of each of these sequences in one pass.

        It runs one token after each buffer, appends its KV, and returns the logits, `(rows, vocabulary)`.
        """
        options = {"logits_to_keep": 1} if self.keeps_logits else {}
        return Rows(self._model, buffers, self.sees, **options).step

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run `tokens` behind each of these sequences in one pass.

        Returns the logits at the last token of each, `(rows, vocabulary)`.
        """
        return run_ragged(self._model, buffers, tokens, self.sees, keeps_logits=self.keeps_logits)

    @property
    def network(self) -> PreTrainedModel:
        """The model itself, for code that needs gradients."""
        return self._model

    def seconds_per_token(self) -> float:
        """Approximate seconds to prefill one token, measured by one forward pass."""
        tokens = min(_PACE_TOKENS, self.max_positions)
        ids, buffer = torch.zeros(1, tokens, dtype=torch.long, device=self.device), KVBuffer(self.shape, tokens)
        began = time.perf_counter()
        logits = self.forward(ids, buffer)
        if logits is not None:
            logits.cpu()  # Waits for an accelerator.
        return (time.perf_counter() - began) / tokens

    def forward_at(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        past: KVTensors | None,
        past_positions: Sequence[int],
        *,
        layers: int | None = None,
    ) -> KVTensors:
        """See `Forward`."""
        self._refuse_moving()
        return forward_at(
            self._model.base_model, self.shape, ids, positions, past, past_positions, self._attention, layers=layers
        )

    @torch.inference_mode()
    def forward_among(  # noqa: PLR0913
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        buffer: KVBuffer,
        places: Sequence[int],
        *,
        unseen: Sequence[int] = (),
        weights: list[Tensor] | None = None,
        logits: bool = False,
    ) -> Tensor | None:
        """Compute `ids` at `positions` and write their KV to `places` of `buffer`.

        Each token attends to all KV in the buffer up to its own position, except to the places `unseen`. `weights`
        takes the attention weights of each layer, `(tokens,)`. With `logits`, returns those after the last of `ids`,
        `(1, vocabulary)`.
        """
        self._refuse_moving()
        if not logits:
            forward_among(
                self._model.base_model, buffer, ids, positions, places, self._attention, unseen=unseen, weights=weights
            )
            return None
        options: dict[str, Any] = {"logits_to_keep": 1} if self.keeps_logits else {}
        output = forward_among(self._model, buffer, ids, positions, places, self._attention, goes_on=True, **options)
        last_logits: Tensor = output.logits[:, -1]
        return last_logits.clone()

    def forward_soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """See `Forward.soft`."""
        self._refuse_moving()
        return forward_soft(self._model.base_model, self.shape, before, header, ids, trailer, self._attention)

    @cached_property
    def rope(self) -> Rope:
        """Moves keys; raises `UnsupportedRequestError` if the model's keys cannot be moved."""
        self._refuse_moving()
        return rope_of(self._model.base_model, self.shape, rope_parameters(self._text), self._attention)

    def _refuse_moving(self) -> None:
        if why := self.lacks.get("compose"):
            raise UnsupportedRequestError(f"Tokens of this model stay where they were computed: {why}.")

    def sampler(self, sampling: Sampling, prompt_ids: tuple[int, ...], constraint: Constraint | None) -> Sampler:
        """A function that chooses the next token.

        It takes logits, `(vocabulary,)`, and the number of tokens that may still come, this one included.
        """
        return Sampler(sampling, prompt_ids, self.shape.device, constraint)

    @torch.inference_mode()
    def _install_attention(self) -> None:
        """Switch to tiled attention if the model accepts it and gives the same logits with it."""
        previous = self.config._attn_implementation  # noqa: SLF001 - transformers has no public name
        if not getattr(self._model, "_supports_attention_backend", False):
            return
        with self._narrowed():
            expected = self._probe_logits()
            try:
                self._model.set_attn_implementation(attention.NAME)
                self.attends = True
                tiled_logits = self._probe_logits()
            except (ValueError, TypeError, RuntimeError) as error:
                logger.info("%s keeps %s attention: %s", self.config.model_type, previous, error)
                tiled_logits = None
        # In bfloat16, the logits of Gemma 3 differ by 8 % from those in float32, and by 6 % from those of tiles.
        if tiled_logits is None or not self._agree(tiled_logits, expected, rounding=0.1):
            self._model.set_attn_implementation(previous)
            self.attends = False

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        """Shorten sliding windows to a few tokens, so that a probe is longer than a window."""
        kind = self.kind
        try:
            with narrowed(kind, self._text, _NARROW) as self.kind:
                yield
        finally:
            self.kind = kind

    def _check_states(self) -> None:
        """Refuse a model whose logits differ between one pass and passes that continue from its states."""
        resumed, expected = self._probe_logits()[1:], self._probe_logits((0, 2 * _PROBE - 1, 2 * _PROBE))
        # In bfloat16, a mixture of experts may choose another expert. A lost state changes the logits more.
        if not self._agree(resumed, expected, rounding=0.2):
            raise UnsupportedModelError(
                f"{self.config.model_type} cannot be served from packs: with the installed transformers it does not go "
                f"on from the states of its recurrent layers (after {_PROBE} tokens its logits are off by "
                f"{float((resumed - expected).norm() / expected.norm()):.0%})."
            )

    def _agree(self, found: Tensor, expected: Tensor, rounding: float = 0.05) -> bool:
        """Whether logits are equal up to a relative error: 1e-3 in float32, `rounding` in shorter dtypes."""
        tolerance = 1e-3 if self.shape.dtype == torch.float32 else rounding
        return bool(((found - expected).norm(dim=1) <= tolerance * expected.norm(dim=1)).all())

    def _probe_ids(self) -> Tensor:
        # Random tokens: the first ids of a vocabulary are special tokens, and some models amplify rounding errors
        # behind these.
        ids = torch.randint(self._text.vocab_size, (1, 2 * _PROBE), generator=torch.Generator().manual_seed(0))
        return ids.to(self.device)

    @torch.inference_mode()
    def _probe_logits(self, edges: Sequence[int] = (0, _PROBE, 2 * _PROBE - 1, 2 * _PROBE)) -> Tensor:
        """Logits at the last token of each pass between `edges`: by default a prefill, another pass, a decode step."""
        ids = self._probe_ids()
        buffer = KVBuffer(self.shape, 2 * _PROBE)
        steps = [self.forward(ids[:, start:stop], buffer) for start, stop in itertools.pairwise(edges)]
        return torch.cat([step for step in steps if step is not None]).float()
