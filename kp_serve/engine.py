"""`VLLMEngine`: sends token ids to a server and receives token ids. Needs a tokenizer, but no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import httpx
import torch
from torch import Tensor

from kp_core.errors import ModelError, PackError, UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.plan.engine import TokenStream
from kp_core.plan.plan import Limit, Plan, Sampling
from kp_core.prompt.template import ChatTemplate
from kp_core.session.session import Session
from kp_core.threads import make_anew
from kp_core.tools import Scores
from kp_serve.asked import COMPUTED, FIRST_PACK, asked

_AT_ONCE = 8  # Connections for the questions of one decision.


def load_session(
    model: Any = None,  # noqa: ANN401 - as `tokenizer`
    *,
    base_url: str,
    api_key: str | None = None,
    timeout: float = 600.0,
) -> Session:
    """A session on the server at `base_url`. `model` is its tokenizer, if that is not the one it names."""
    engine = VLLMEngine(base_url, api_key=api_key, tokenizer=model, timeout=timeout)
    return Session(engine, name=engine.name)


class VLLMEngine:
    """Runs plans on a server that `kp serve` started: an `Engine` without a model of its own.

    The server finds the packs that a prompt begins with in its own store, by their token ids, if the key may read them.
    It computes missing KV, and stores that if the key may write. So clients of the same store put packs there without
    KV, and the server compiles them on first use.

    `base_url` is the server's address, with or without `/v1`. `tokenizer` is an object, a folder or an id; the default
    is what the server names. `timeout` is in seconds. Raises `ModelError` if no such server answers, the key is
    refused, or the tokenizer or its chat template is not that of the served model.
    """

    supports = frozenset({"sampling", "grammar", "lazy", "steer", "compose"})
    lacks: Mapping[str, str] = {
        "kv": "the server keeps the KV of packs itself, and packs are compiled there when they are first used",
    }

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        tokenizer: Any = None,  # noqa: ANN401 - of the transformers family
        timeout: float = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._given, self._timeout = tokenizer, timeout
        self.forked()
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: the connections are those of the other."""
        # Uvicorn closes a connection that was idle for 5 s; one that is used at that moment is lost.
        transport = httpx.HTTPTransport(retries=2, limits=httpx.Limits(keepalive_expiry=2))
        self._client = httpx.Client(headers=self._headers, timeout=self._timeout, transport=transport)

    @cached_property
    def _about(self) -> Any:  # noqa: ANN401 - JSON
        with self._errors():
            response = self._client.get(f"{self.base_url}/v1/packs/model")
            if response.status_code == 404:
                hint = "Start it with `kp serve MODEL --store …`."
                raise ModelError(f"{self.base_url} is a server without packs. {hint}")
            self._check(response)
            return response.json()

    @property
    def name(self) -> str:
        """The server's name of its model."""
        return str(self._about["model"])

    @cached_property
    def identity(self) -> ModelFingerprint:
        """See `Engine.identity`; the server reports it."""
        return ModelFingerprint.from_dict(self._about["identity"])

    @cached_property
    def tokenizer(self) -> Any:  # noqa: ANN401
        """See `Engine.tokenizer`; it is checked against the served model's."""
        from kp_core.engines.hf.identity import load_tokenizer, tokenizer_identity

        source = self._given or self._about["root"]
        tokenizer = load_tokenizer(source) if isinstance(source, str) else source
        identity = tokenizer_identity(tokenizer, ChatTemplate(tokenizer))
        if differing := [name for name, digest in identity.items() if getattr(self.identity, name) != digest]:
            raise ModelError(
                f"The tokenizer of {str(source)[:80]!r} is not that of the model at {self.base_url} "
                f"({' and '.join(differing)} differ). Pass the tokenizer of {self.name}."
            )
        return tokenizer

    @property
    def max_positions(self) -> int:
        """See `Engine.max_positions`."""
        return int(self._about["max_positions"])

    def run(self, plan: Plan) -> TokenStream:
        """See `Engine.run`. Reused tokens are known only at the end: a cancelled answer counts its whole prompt as
        computed.

        Raises `UnsupportedRequestError` for composers that do more than move packs.
        """
        return self._stream(plan)

    def _stream(self, plan: Plan, **more: Any) -> TokenStream:  # noqa: ANN401
        """The answer to a plan; `more` are further fields of the request."""
        sampling = plan.sampling
        composers = {region.composer.key: region.composer for region in plan.regions if region.composer}
        if unsupported := sorted(key for key, composer in composers.items() if not composer.only_moves):
            raise UnsupportedRequestError(
                f"{self.base_url} does not offer composer={unsupported[0]!r}: a server moves packs, or reads exact "
                "ones. `kp_core.load_engine(model)`, which runs the model on this machine, does."
            )
        body: dict[str, Any] = {
            "model": self.name,
            "prompt": list(plan.prompt.token_ids),
            "max_tokens": plan.token_budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**63
        if plan.grammar is not None:
            body["structured_outputs"] = {"grammar": plan.grammar}
        if (altered := asked(plan)) is not None:
            body["kp"] = altered
        return TokenStream(partial(self._answer, plan, body | more))

    def branch(
        self, plans: Sequence[Plan], stream: TokenStream, tokens: Sequence[Collection[int]]
    ) -> Generator[Tensor]:
        """See `Branches.branch`. Each plan is a request for one token.

        Raises `UnsupportedRequestError` for a server that does not give the log-probabilities of chosen tokens.
        """

        def run(plan: Plan, ids: Collection[int]) -> TokenStream:
            plain = replace(plan, sampling=Sampling(), token_budget=1, grammar=None)
            answer = self._stream(plain, logprobs=1, logprob_token_ids=[*ids], return_tokens_as_token_ids=True)
            answer.limit = stream.limit
            for _ in answer:
                pass
            return answer

        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            for some in (slice(1), slice(1, None)):  # In the server's cache the others find what the first computes.
                for ids, answer in zip(tokens[some], pool.map(run, plans[some], tokens[some]), strict=True):
                    if stream.limit.is_set():
                        raise CancelledError
                    stream.computed_tokens += answer.computed_tokens
                    stream.approximate_tokens = answer.approximate_tokens
                    scores = dict(chain.from_iterable(answer.logprobs))
                    if not scores.keys() >= set(ids):
                        raise UnsupportedRequestError(
                            f"{self.base_url} does not offer decisions: it does not give the log-probabilities of "
                            "chosen tokens, as vLLM does from 0.32 on."
                        )
                    logits = torch.full((max(scores) + 1,), math.nan, dtype=torch.float64)
                    logits[[*scores]] = torch.tensor([*scores.values()], dtype=torch.float64)
                    yield logits
        finally:
            pool.shutdown(cancel_futures=True)

    def kv(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:  # noqa: ARG002 - the seam's
        """Raises `UnsupportedRequestError`: KV stays on the server that computed it."""
        raise UnsupportedRequestError(f"{self.base_url} gives no KV: {self.lacks['kv']}.")

    def compile(
        self, text: str, namespace: str, compiled_for: str = "user", provenance: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Have the server compile a text and store its pack. Returns the server's answer (see `docs/scale.md`).

        Raises `PackError` for a text that cannot be a pack there, `ModelError` for any other failure.
        """
        body: dict[str, Any] = {"text": text, "namespace": namespace, "compiled_for": compiled_for}
        body["provenance"] = dict(provenance or {})
        with self._errors():
            response = self._client.post(f"{self.base_url}/v1/packs", json=body)
            if response.status_code in (400, 413):
                raise PackError(f"{self.base_url} does not compile {text[:40]!r}: {_error_message(response)}")
            self._check(response)
            report: dict[str, Any] = response.json()
            return report

    def forget(self, text: str, namespace: str) -> None:
        """Have the server delete its pack of a text, if it has one. Raises `ModelError` for any failure."""
        with self._errors():
            body = {"text": text, "namespace": namespace}
            self._check(self._client.request("DELETE", f"{self.base_url}/v1/packs", json=body))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _answer(self, plan: Plan, body: dict[str, Any], stream: TokenStream) -> Iterator[int]:
        stream.computed_tokens = len(plan.prompt)
        moved_spans = [span for region in plan.regions if region.composer and plan.reuse for span in region.spans]
        stream.approximate_tokens = sum(map(len, moved_spans))
        waiting: list[int] = []
        ended: dict[str, Any] | None = None
        computed_before = 0  # Tokens that the server computed before it could steer or move.
        spans = plan.prompt.spans
        headers = {FIRST_PACK: spans[0].handle} if spans and find_handles(spans[0].handle) else {}
        for event in self._events(body, headers, stream.limit):
            if stream.limit.is_set():
                break
            computed_before = event.get(COMPUTED, computed_before)
            for choice in event.get("choices", ()):
                tokens = choice.get("token_ids") or []
                stream.logprobs += _scores(choice)
                if not choice.get("finish_reason"):
                    yield from tokens
                    continue
                ended, waiting = choice, tokens  # Hold the last tokens back until the usage comes.
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                stream.found_tokens = details.get("cached_tokens", 0)
                stream.computed_tokens = computed_before + usage["prompt_tokens"] - stream.found_tokens
        if stream.limit.is_set():
            stream.finish = "cancelled"
            return
        if ended is None:
            raise ModelError(f"{self.base_url} ended the answer before it was complete.")
        is_end = ended["finish_reason"] == "stop" and not isinstance(ended.get("stop_reason"), str)
        for at, token in enumerate(waiting, 1):
            if is_end and at == len(waiting):
                stream.finish = "stop"
            yield token

    def _events(self, body: dict[str, Any], headers: Mapping[str, str], limit: Limit) -> Iterator[dict[str, Any]]:
        """The events of an answer, until the time limit, also where the server is busy."""
        timeout = self._client.timeout
        if limit.timeout is not None:
            timeout = httpx.Timeout(max(limit.timeout - limit.spent, 1e-3))
        address = f"{self.base_url}/v1/completions"
        try:
            request = self._client.stream("POST", address, json=body, headers=headers, timeout=timeout)
            with self._errors(), request as response:
                if response.is_error:
                    response.read()
                self._check(response)
                yield {COMPUTED: int(response.headers.get(COMPUTED, 0))}
                for line in response.iter_lines():
                    payload = line.removeprefix("data: ")
                    if payload in (line, "[DONE]"):
                        continue
                    yield self._event(payload)
        except ModelError:
            if not limit.is_over:
                raise

    def _event(self, payload: str) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(payload)
        if error := event.get("error"):
            raise ModelError(f"{self.base_url} could not answer: {error.get('message', error)}")
        return event

    def _check(self, response: httpx.Response) -> None:
        """Raise `ModelError` with the server's error message."""
        if response.is_error:
            raise ModelError(f"{self.base_url} answered {response.status_code}: {_error_message(response)}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise ModelError(f"{self.base_url} did not answer in time ({type(error).__name__}).") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ModelError(
                f"No server of `kp serve` answers at {self.base_url} ({type(error).__name__}: {error}). "
                "Check the address, and that it has started."
            ) from error


def _scores(choice: Mapping[str, Any]) -> list[Scores]:
    """The log-probabilities in a choice whose tokens are named by their ids, as `token_id:7`; NaN comes as null."""
    tops = (choice.get("logprobs") or {}).get("top_logprobs", ())
    named = ([(int(name.removeprefix("token_id:")), value) for name, value in top.items()] for top in tops)
    return [[(token, math.nan if value is None else value) for token, value in scores] for scores in named]


def _error_message(response: httpx.Response) -> str:
    """The error message of a server."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
