"""Conversations on any engine: makes plans from messages, runs them, and returns answers with their cost."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import platform
import threading
from collections import deque
from collections.abc import Callable, Container, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from kp_core.errors import (
    ContextOverflowError,
    ModelError,
    OptionError,
    PackError,
    PromptError,
    ShortTextError,
    UnsupportedRequestError,
    gone,
)
from kp_core.events import log_event
from kp_core.kv import KVTensors
from kp_core.packs.codec import Compression
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.pickling import Shared
from kp_core.plan.composer import Host
from kp_core.plan.engine import CAPABILITIES, Attends, Branches, Compiles, Engine, HasCache, TokenStream
from kp_core.plan.plan import Limit, Plan
from kp_core.plan.planner import Learned, Planner
from kp_core.plan.request import CompiledFor, Request
from kp_core.progress import bar_of
from kp_core.prompt.conversation import Message
from kp_core.prompt.template import ChatTemplate
from kp_core.session.deciding import (
    Decisions,
    Question,
    Rotations,
    asked_behind,
    ballots_of,
    continued,
    log_probability,
)
from kp_core.session.explain import Explanation
from kp_core.session.idle import IdleQueue, Job
from kp_core.session.reading import Generation, grammar_of, miss_of, read_answer, usage_of, usage_of_all
from kp_core.session.stream import AsyncStream, Stream, in_thread
from kp_core.steering import Pair, Steering
from kp_core.steering.contrast import make_steering
from kp_core.threads import computing, make_anew
from kp_core.tools import Delta

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


class Session(Shared):
    """Does everything with an engine: builds packs, and answers, explains and measures conversations.

    `template` is by default that of the engine's tokenizer. Options of a request are those of `Request`, by name.
    Unknown options raise `OptionError`, and options that the engine does not support raise `UnsupportedRequestError`,
    both at the call. Several threads may use one session.
    """

    def __init__(self, engine: Engine, *, name: str | None = None, template: ChatTemplate | None = None) -> None:
        self.engine, self.name = engine, name or type(engine).__name__
        self.loads: Callable[[], Session] | None = None
        """Loads it in another process; `None` if nothing can. `load_engine` sets it."""
        self.template = template or ChatTemplate(engine.tokenizer)
        """The model's chat template."""
        self.tokenizer: Any = engine.tokenizer
        """The model's tokenizer."""
        self._idle, self._planning = IdleQueue(), threading.Lock()
        self._last_planner: Planner | None = None
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: begin as a new session on the engine. The other process does its background work."""
        atexit.unregister(self._idle.close)
        self._idle, self._planning, self._last_planner = IdleQueue(), threading.Lock(), None

    def _opens(self) -> Callable[[], Session]:
        if self.loads is None:
            raise ModelError(
                f"An engine with the model object {self.name!r} cannot be pickled: only an id, a folder, a file or an "
                "address can be loaded in another process. Pass one of those to `load_engine`, or leave the engine out "
                "and give `model=`, or load it in the process that needs it."
            )
        return self.loads

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The model and its numerics. The weights are hashed on first use, or when their files change."""
        return self.engine.identity

    @property
    def supports(self) -> frozenset[str]:
        """See `Engine.supports`."""
        return self.engine.supports

    @property
    def lacks(self) -> Mapping[str, str]:
        """See `Engine.lacks`."""
        return self.engine.lacks

    @property
    def compiler(self) -> Compiles | None:
        """The server that compiles packs in a store of its own, if the engine is one."""
        return self.engine if isinstance(self.engine, Compiles) else None

    @property
    def is_lazy(self) -> bool:
        """Whether all packs are built without KV, because a server computes it."""
        return "lazy" in self.supports and "kv" not in self.supports

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.max_positions

    @property
    def _planner(self) -> Planner:
        """The planner for the model as it is now. It holds all that is known of the model, so another needs another."""
        with self._planning:
            if self._last_planner is None or self._last_planner.model != self.fingerprint:
                build = partial(self.build_packs, progress=False)
                host = Host(self.engine, self.fingerprint, self.template, self._attention, build, self.when_idle)
                self._last_planner = Planner(host)
            return self._last_planner

    @property
    def host(self) -> Host:
        """What composers may use of the model as it is now."""
        return self._planner.host

    def _attention(self, plan: Plan, layers: int | None) -> Tensor | None:
        self._need("attention", "choosing packs by attention")
        return self.engine.attention(plan, layers) if isinstance(self.engine, Attends) else None

    def generate(self, messages: Sequence[Message] | str, **options: Any) -> Generation:  # noqa: ANN401 - of `Request`
        """The answer to a conversation (a string is one user message).

        Raises `PromptError` for messages that cannot become a prompt, `ContextOverflowError`,
        `PackError` for a steering of another model, and for packs of one unless `mismatch="rebuild"`,
        `OptionError` for a steering that has no position in the prompt and for other bad options, and
        `ModelError` for a request larger than the engine's memory.
        """
        return self.stream(messages, **options).result()

    def stream(self, messages: Sequence[Message] | str, **options: Any) -> Stream:  # noqa: ANN401
        """The answer in pieces. Raises as `generate`, at the call."""
        request = Request.of(options)
        return self._stream(messages, request, Limit(request.cancel, request.timeout))

    def _stream(self, messages: Sequence[Message] | str, request: Request, limit: Limit) -> Stream:
        with self._idle.request(), computing:  # Background work that it queues begins behind it.
            plan = self._plan(messages, request)
            self._need("sampling", "sampled answers", needed=request.temperature > 0 or request.repetition_penalty != 1)
            self._need("logprobs", "log-probabilities", needed=request.gives_logprobs)
            return Stream(self._answer(plan, request, self._start(plan, limit)))

    def generate_many(
        self,
        requests: Mapping[Key, Any] | Iterable[tuple[Key, Any]],
        *,
        at_once: int = 8,
        done: Container[Key] = (),
        progress: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> Iterator[tuple[Key, Generation]]:
        """Answers many conversations, `at_once` at a time. Yields each key with its answer when it is complete.

        A request is a conversation as `generate` takes it, or a mapping of `messages` and the request's own options.
        `done` are keys to skip, such as those of an interrupted run. `options` are those of `generate`, for all
        requests. An error in one request ends the run. Leaving the loop ends the requests under way.
        """
        if not isinstance(at_once, int) or at_once < 1:
            raise OptionError(f"Got at_once={at_once!r}; expected a whole number of at least 1.")
        if not isinstance(done, Container):
            raise OptionError(f"Got done={done!r}; expected a set or list of keys.")
        if "cancel" in options:
            raise OptionError("Got cancel=; leave the loop to stop, which ends what is under way.")
        pairs = map(_checked_pair, requests.items() if isinstance(requests, Mapping) else requests)
        todo = [(key, each if isinstance(each, Mapping) else {"messages": each}) for key, each in pairs]
        # A request reuses the KV of earlier ones with the same beginning, and they are decoded over the same keys.
        todo.sort(key=lambda pair: _beginning(pair[0], **pair[1]))
        todo = [(key, request) for key, request in todo if key not in done]

        def answers() -> Iterator[tuple[Key, Generation]]:
            cancel, remaining = threading.Event(), iter(todo)
            running: dict[Future[Generation], Key] = {}
            bar = bar_of("Answering", len(todo), "answer", shown=progress)
            with bar, ThreadPoolExecutor(at_once, "kp-many") as pool:
                try:
                    while True:
                        for key, request in islice(remaining, at_once - len(running)):
                            running[pool.submit(self.generate, **{**options, **request, "cancel": cancel})] = key
                        if not running:
                            return
                        for future in wait(running, return_when=FIRST_COMPLETED).done:
                            key = running.pop(future)
                            bar.update()
                            yield key, future.result()
                finally:
                    cancel.set()  # A caller that leaves the loop early, or gets an error, waits for one step at most.

        return answers()

    async def agenerate(self, messages: Sequence[Message] | str, **options: Any) -> Generation:  # noqa: ANN401
        """As `generate`, without blocking the event loop. Cancelling the task stops the generation."""
        request, limit = _of_asyncio(options)
        return await in_thread(lambda: self._stream(messages, request, limit).result(), limit)

    def astream(self, messages: Sequence[Message] | str, **options: Any) -> AsyncStream:  # noqa: ANN401
        """As `stream`, without blocking the event loop. Leaving the loop early stops the generation."""
        request, limit = _of_asyncio(options)
        return AsyncStream(lambda: self._stream(messages, request, limit), limit)

    def prefill(self, messages: Sequence[Message] | str, **options: Any) -> Generation:  # noqa: ANN401
        """Prefill a conversation, and answer with no token. Warms the cache, and gives the logits after the prompt."""
        self._need("logits", "a prefill alone")
        request = Request.of(options)
        limit = Limit(request.cancel, request.timeout)
        plan = self._plan(messages, request, tokens=0)
        with self._idle.request():
            stream = self._start(plan, limit)
            for _ in stream:
                pass
        self._keep(plan, request, stream)
        limit.check(0)
        if stream.first_logits is None:
            raise CancelledError("The prefill was cancelled.")
        miss = miss_of(plan, stream.found_tokens, self.template, request.shape.tools)
        usage = usage_of(plan, stream, 0, limit.spent, miss)
        return Generation("", (), stream.finish, usage, plan.prompt, stream.first_logits)

    def decide(
        self,
        state: Sequence[Message] | str,
        questions: Mapping[Any, Question],
        *,
        rotations: Rotations = 1,
        **options: Any,  # noqa: ANN401
    ) -> Decisions:
        """The probability of each label of each question about `state`, a conversation as for `generate`.

        Nothing is decoded: a question ends the last user message, or is a new one, and the logits behind it are read at
        the tokens of its labels. Labels of one token stand for themselves, others get letters. Models favour places
        in a list, so `rotations` orders of the labels are asked, at most as many as there are labels (`"all"`), and the
        mean is taken; each order costs a question. Thinking is off. All questions are computed behind one state, with
        the same result as each alone.

        Raises as `generate`, `OptionError` for bad questions, `UnsupportedRequestError` for models that cannot leave
        out thinking, and `ModelError` for logits that are no numbers.
        """
        request = Request.of(options)
        return self._decide(state, questions, rotations, request, Limit(request.cancel, request.timeout))

    async def adecide(
        self,
        state: Sequence[Message] | str,
        questions: Mapping[Any, Question],
        *,
        rotations: Rotations = 1,
        **options: Any,  # noqa: ANN401
    ) -> Decisions:
        """As `decide`, without blocking the event loop. Cancelling the task ends it."""
        request, limit = _of_asyncio(options)
        return await in_thread(lambda: self._decide(state, questions, rotations, request, limit), limit)

    def _decide(
        self,
        state: Sequence[Message] | str,
        questions: Mapping[Any, Question],
        rotations: Rotations,
        request: Request,
        limit: Limit,
    ) -> Decisions:
        if not isinstance(self.engine, Branches):
            raise self._lacking("decisions")
        if request.thinking is None and self.template.thinking_switch:
            request = replace(request, thinking=False)
        if isinstance(state, Iterable) and not isinstance(state, str):
            state = [*state]  # Each question reads it.
        ballots = [*ballots_of(questions, rotations, self.tokenizer)]
        plans = list[Plan]()
        for ballot in ballots:
            plans.append(self._plan(asked_behind(state, ballot.text), request, tokens=0, learn=not plans))
        if plans[0].opened or self.template.tool_format.answer:
            raise UnsupportedRequestError(f"{self.name} begins each answer with a thought, so it decides nothing.")
        stream, shares = TokenStream(lambda _: iter(())), dict[Any, list[Tensor]]()
        stream.limit, tokens = limit, [frozenset().union(*ballot.tokens) for ballot in ballots]
        with self._idle.request(), closing(self.engine.branch(plans, stream, tokens)) as branches:
            try:
                for ballot, stream.first_logits in zip(ballots, branches, strict=True):
                    shares.setdefault(ballot.key, []).append(ballot.shares(stream.first_logits))
            except CancelledError:
                limit.check(0)
                raise
        self._keep(plans[0], request, stream)
        return Decisions(
            {key: question.decided(shares[key]) for key, question in questions.items()}, usage_of_all(plans, stream)
        )

    def log_likelihoods(
        self,
        conversations: Iterable[Sequence[Message] | str],
        answer: str,
        **options: Any,  # noqa: ANN401
    ) -> list[float]:
        """The log-probability of the text `answer` as the answer to each of `conversations`, in nats, at most 0.

        Conversations and options are as for `generate`; nothing is decoded. By Bayes' rule it says to which of several
        texts a question belongs, also with models that are too small to be asked.

        Raises as `generate`, and `ModelError` for logits that are no numbers.
        """
        if not isinstance(self.engine, Branches):
            raise self._lacking("likelihoods")
        if isinstance(conversations, str):
            raise OptionError(f"Got {conversations[:40]!r} as conversations; expected a list of them.")
        request, tokens = Request.of(options), self.tokenizer.encode(answer, add_special_tokens=False)
        if request.thinking is None and self.template.thinking_switch:
            request = replace(request, thinking=False)
        limit, sums = Limit(request.cancel, request.timeout), list[float]()
        for messages in conversations:
            plans = continued(self._plan(messages, request, tokens=len(tokens), learn=False), tokens)
            stream = TokenStream(lambda _: iter(()))
            stream.limit = limit
            with self._idle.request(), closing(self.engine.branch(plans, stream, [[each] for each in tokens])) as rows:
                sums.append(sum(map(log_probability, rows, tokens)) if plans else 0.0)
        return sums

    def explain(self, messages: Sequence[Message] | str, **options: Any) -> Explanation:  # noqa: ANN401
        """What `generate` would do with this request, as a table of regions. A composer that chooses packs does."""
        request = Request.of(options)
        plan = self._plan(messages, request, learn=False)
        found, is_bitwise = self._planner.cached_tokens(plan), "bitwise" in self.supports
        miss = miss_of(plan, found, self.template, request.shape.tools)
        return Explanation.of(plan, found, is_bitwise=is_bitwise, miss=miss)

    def build_pack(  # noqa: PLR0913 - as `build_packs`
        self,
        text: str,
        *,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        provenance: Mapping[str, str] | None = None,
        compress: Compression = "none",
    ) -> KnowledgePack:
        """`text` compiled for the position `compiled_for` (see `ChatTemplate.tokenise_pack`).

        A lazy pack holds only text and token ids; its KV is computed on first use. `provenance` (`title`, `source`,
        ...) is stored in the pack. `compress` says how its KV is stored (see `KnowledgePack.compressed`).
        """
        provenances = [provenance or {}]
        options: dict[str, Any] = {"lazy": lazy, "provenance": provenances, "compress": compress}
        return next(self.build_packs([text], namespace=namespace, compiled_for=compiled_for, **options))

    def build_packs(  # noqa: PLR0913 - as `build_pack`, for many
        self,
        texts: Sequence[str],
        *,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        provenance: Sequence[Mapping[str, str]] | None = None,
        on_short: Callable[[str, PromptError], object] | None = None,
        compress: Compression = "none",
        progress: bool = True,
    ) -> Iterator[KnowledgePack]:
        """The packs of `texts`, in order and one at a time, each with the same bits as from `build_pack`.

        On a server all packs are lazy, and the server compiles them on first use. A text that is too short for a token
        of its own, or longer than the model's positions, is left out and passed to `on_short`; without `on_short`, its
        error is raised.
        """
        lazy = lazy or self.is_lazy
        self._need("kv", "building packs", needed=not lazy)
        annotated_texts = zip(texts, provenance or repeat({}, len(texts)), strict=True)
        environment = {"device": platform.machine(), "torch": importlib.metadata.version("torch"), "engine": self.name}
        limit_tokens = None if lazy else self.max_positions
        waiting: deque[KnowledgePack] = deque()

        def plans() -> Iterator[Plan]:
            """The plans for the KV of all packs. Each pack is in `waiting` until its KV is computed."""
            for text, details in annotated_texts:
                try:
                    prefix, token_ids = self.template.tokenise_pack(text, compiled_for, most=limit_tokens)
                except (ShortTextError, ContextOverflowError) as error:
                    if on_short is None:
                        raise
                    on_short(text, error)
                    continue
                identity, recorded = self.engine.identity, {**environment, **details}
                waiting.append(KnowledgePack(text, namespace, token_ids, prefix, identity, provenance=recorded))
                yield self._planner.plan_kv(prefix, token_ids, namespace)

        kvs = (None for _ in plans()) if lazy else self.engine.kv(plans())
        for kv in bar_of("Building packs", len(texts), "pack", kvs, shown=progress):
            yield replace(waiting.popleft(), kv=kv).compressed(compress)

    def kv(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:
        """The KV of `plan.wanted` for each plan; see `Engine.kv`."""
        self._need("kv", "KV")
        return self.engine.kv(plans)

    def make_steering(self, pairs: Sequence[Pair], **options: Any) -> Steering:  # noqa: ANN401
        """A steering from the differences in `pairs` of (positive, negative). Options: `contrast.make_steering`."""
        self._need("kv", "making steerings")
        self._need("steer", "steering")
        plan_kv = self._planner.plan_kv
        return make_steering(
            self.fingerprint,
            self.template,
            lambda sides: self.engine.kv([plan_kv(*side) for side in sides]),
            pairs,
            **options,
        )

    def when_idle(self, job: Job) -> Future[None]:
        """Run `job` step by step while no request is being answered. Raises `ModelError` when too many jobs wait."""
        return self._idle.put(job)

    def refresh(self) -> None:
        """Start to use the model as it is now, after its weights were changed on purpose.

        Computes the fingerprint again, from the tensors themselves, and drops all KV in memory. Packs made before the
        change then belong to another model. Raises `ModelError` while answers are under way.
        """
        self._cache("refresh").refresh()

    def close(self) -> None:
        """End background work. Requests are still answered."""
        self._idle.close()

    def pin(self, *_: object) -> NoReturn:
        """Raises `UnsupportedRequestError`."""
        raise UnsupportedRequestError(f"There is no `Session.pin`.{gone('pin')}")

    @property
    def cached_bytes(self) -> int:
        """Bytes of KV in the prefix tree; its budget limits them."""
        return self._cache("cached_bytes").cached_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token."""
        return self._cache("bytes_per_token").bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent-layer states at each end of a pack or a message; 0 for models without such layers."""
        return self.engine.state_bytes if isinstance(self.engine, HasCache) else 0

    def clear_cache(self) -> None:
        """Drop all KV that is not in use."""
        self._cache("clear_cache").clear_cache()

    def _need(self, capability: str, what: str, *, needed: bool = True) -> None:
        """Raise `UnsupportedRequestError` for `what`, if it is `needed` and the engine lacks the capability."""
        if needed and capability not in self.supports:
            if reason := self.lacks.get(capability):
                raise UnsupportedRequestError(f"{self.name} does not offer {what}: {reason}.")
            raise self._lacking(f"{what} ({CAPABILITIES[capability]})")

    def _cache(self, what: str) -> HasCache:
        """The engine; raises `UnsupportedRequestError` unless it has a cache."""
        if not isinstance(self.engine, HasCache):
            raise self._lacking(what)
        return self.engine

    def _lacking(self, what: str) -> UnsupportedRequestError:
        return UnsupportedRequestError(
            f"{self.name} does not offer {what}. `kp_core.load_engine(model)`, which runs the model on this machine, "
            "does."
        )

    def _plan(
        self, messages: Sequence[Message] | str, request: Request, *, tokens: int | None = None, learn: bool = True
    ) -> Plan:
        planner = self._planner
        plan, learned, met = planner.plan(messages, request, tokens)
        grammar, opened = grammar_of(self.template, plan.prompt, request)
        sources = {region.source for region in plan.regions}
        self._need("steer", "steering", needed="steered" in sources)
        self._need("compose", f"composer={request.composer.key!r}", needed="composed" in sources)
        self._need("grammar", "tools and response schemas", needed=grammar is not None)
        if learn:
            planner.note(met)
            self._caution(plan, request)
            self._compile(learned, request)
        return replace(plan, grammar=grammar, opened=opened)

    def _caution(self, plan: Plan, request: Request) -> None:
        """Log once for each store what its composers say of their answers."""
        host = replace(self.host, view=request.view)
        composers = [region.composer for region in plan.regions if region.composer and not plan.choice]
        for composer in [request.composer, *composers] if plan.prompt.unread and not plan.choice else composers:
            if not composer.exact and (host.place, composer.key) not in host.cautioned:
                host.cautioned.add((host.place, composer.key))
                if caution := composer.caution(host):
                    logger.warning("%s", caution)

    def _start(self, plan: Plan, limit: Limit) -> TokenStream:
        stream = self.engine.run(plan)
        stream.limit, stream.ttft_s = limit, limit.spent
        return stream

    def _answer(self, plan: Plan, request: Request, stream: TokenStream) -> Generator[Delta, None, Generation]:
        with self._idle.request():
            generation = yield from read_answer(plan, stream, self.template, request)
        self._keep(plan, request, stream)
        usage = generation.usage
        log_event(logger, "packs read", packs=len(plan.prompt.spans), **{**vars(usage), "miss": bool(usage.miss)})
        return generation

    def _keep(self, plan: Plan, request: Request, stream: TokenStream) -> None:
        """Store the KV that the engine gave back for `Plan.keep`: now if that was asked for, else when it is idle."""
        if plan.packs is None or not stream.kept:
            return
        store, kept = plan.packs.source, stream.kept

        def steps() -> Iterator[None]:
            for entry, kv in kept:
                try:
                    store.write(entry, kv)
                except (OSError, PackError) as error:
                    logger.warning("KV of %s could not be kept: %s", ", ".join(sorted(entry.owners)), error)
                yield

        if request.keep == "always" or plan.prompt.marked:
            deque(steps(), maxlen=0)
        else:
            with suppress(ModelError):  # A later request can store it.
                self.when_idle(steps)

    def _compile(self, learned: Learned, request: Request) -> None:
        """Compile packs for their positions, in the background, for the next request."""
        if request.view is None or "kv" not in self.supports:
            return
        put = request.view.source.put_again  # Its text may be removed before the engine is idle.

        def stored(pack: KnowledgePack, plan: Plan) -> Iterator[None]:
            for kv in self.engine.kv([plan]):
                put(replace(pack, kv=kv))
                yield

        with suppress(ModelError):  # The next such request tries again.
            for pack, plan in learned:
                self.when_idle(partial(stored, pack, plan))


def _checked_pair(request: tuple[Key, Any]) -> tuple[Key, Any]:
    """`request`. Raises `OptionError` unless it is a pair: a text of two letters is none."""
    if not isinstance(request, tuple | list) or len(request) != 2:
        raise OptionError(f"Got the request {request!r}; expected a pair of its key and a conversation.")
    return request


def _beginning(key: object, messages: Any = None, packs: Iterable[Any] | None = None, **_: object) -> str:  # noqa: ANN401
    """The sort key of a request: its packs by name, then the conversation from its first word on."""
    if messages is None:
        expected = "expected a conversation, or a mapping of `messages` and options"
        raise OptionError(f"The request {key!r} has no messages; {expected}.")
    names = [str(getattr(pack, "text", pack)) for pack in packs or ()]
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    turns = [each for each in said if isinstance(each, Mapping)] if isinstance(said, Sequence) else ()
    return "\n".join((*names, *(f"{turn.get('role')}: {turn.get('content')}" for turn in turns)))


def _of_asyncio(options: Mapping[str, Any]) -> tuple[Request, Limit]:
    """A request that can be cancelled, and its limit, which counts from now: it may wait for a thread."""
    request = Request.of({**options, "cancel": options.get("cancel") or threading.Event()})
    return request, Limit(request.cancel, request.timeout)
