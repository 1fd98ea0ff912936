"""Conformance kits for two seams: `check_engine` for `Engine`, `check_composer` for `Composer`.

Run one in a test of your own implementation. The first broken rule is an `AssertionError` that states the rule.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from kp_core import Composer
from kp_core.engines.shared import load_engine, session_of
from kp_core.errors import PackError
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.plan.engine import CAPABILITIES, Attends, Engine, HasCache, TokenStream
from kp_core.plan.plan import Limit, Plan
from kp_core.plan.request import Request
from kp_core.session.reading import Generation
from kp_core.session.session import Session
from tests.kits.models import tiny_model, tiny_tokenizer
from tests.kits.stores import holds

__all__ = ["check_composer", "check_engine"]

_ASKED = "Which island is green?"
_FACTS = ("The first island is green.", "The second island is blue.")
_SCHEMA = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
_TOKENS = 4


def check_engine(engine: Engine | Session) -> None:
    """Check the rules of `Engine`, and those of each capability that `engine.supports` names.

    Raises `AssertionError` with the broken rule.
    """
    model = engine.engine if isinstance(engine, Session) else engine
    holds("An engine has all members of `Engine`.", isinstance(model, Engine))
    _check_members(model)
    for check in (_check_answers, _check_packs, _check_capabilities, _check_logprobs):
        check(session_of(engine))


def _check_members(model: Engine) -> None:
    supports, lacks = set(model.supports), set(model.lacks)
    holds("`supports` and `lacks` have only names of `CAPABILITIES`.", supports | lacks <= set(CAPABILITIES))
    holds("`lacks` gives reasons only for what `supports` does not name.", not supports & lacks)
    holds("`identity` is a ModelFingerprint.", isinstance(model.identity, ModelFingerprint))
    holds("`identity` is the same each time.", model.identity == model.identity)
    holds("`max_positions` is a positive integer.", isinstance(model.max_positions, int) and model.max_positions > 0)
    holds(
        "With `attention`, it has the members of `Attends`.", "attention" not in supports or isinstance(model, Attends)
    )


def _check_answers(session: Session) -> None:
    engine, plan = session.engine, _plan(session, max_tokens=_TOKENS)
    stream = engine.run(plan)
    holds("`run` returns a TokenStream.", isinstance(stream, TokenStream))
    holds("`run` computes nothing before the first token is read.", stream.computed_tokens == 0)
    tokens = list(stream)
    holds("Tokens are integers from 0 on.", all(isinstance(token, int) and token >= 0 for token in tokens))
    holds("An answer has at least one token.", len(tokens) > 0)
    holds("An answer has at most `plan.token_budget` tokens.", len(tokens) <= _TOKENS)
    holds("An answer shorter than its budget has the finish 'stop'.", len(tokens) == _TOKENS or stream.finish == "stop")
    holds("`computed_tokens` counts tokens of the prompt.", 0 <= stream.computed_tokens <= len(plan.prompt))
    holds("Equal greedy plans have equal answers.", list(engine.run(plan)) == tokens)
    begun = engine.run(plan)
    next(begun)
    begun.close()
    holds("A stream may be closed early, and the next answer is the same.", list(engine.run(plan)) == tokens)
    holds("With a budget of 0, there are no tokens.", not list(engine.run(plan.until(len(plan.prompt)))))
    limited = engine.run(plan)
    limited.limit = Limit(timeout=1e-9)
    is_early = not list(limited)
    holds("A stream that its limit ends before a token is 'cancelled'.", not is_early or limited.finish == "cancelled")
    alone = [session.generate(text, max_tokens=_TOKENS).token_ids for text in (*_FACTS, _ASKED)]
    together = dict(session.generate_many(enumerate((*_FACTS, _ASKED)), max_tokens=_TOKENS, progress=False))
    holds("Answers in several threads are those alone.", alone == [together[at].token_ids for at in range(3)])


def _check_packs(session: Session) -> None:
    pack = session.build_pack(_FACTS[0], compiled_for="system", lazy=True)
    with_pack = session.generate(_ASKED, packs=[pack], max_tokens=_TOKENS)
    messages = [{"role": "system", "content": f"{_FACTS[0]}\n"}, {"role": "user", "content": _ASKED}]
    as_text = session.generate(messages, max_tokens=_TOKENS)
    is_equal = with_pack.prompt.token_ids != as_text.prompt.token_ids or with_pack.token_ids == as_text.token_ids
    holds("A pack gives the answer that its text gives.", is_equal)


def _check_capabilities(session: Session) -> None:
    supports, plain = session.engine.supports, session.generate(_ASKED, max_tokens=_TOKENS)
    if "kv" in supports:
        packs = list(session.build_packs(_FACTS, progress=False))
        is_whole = all(pack.kv is not None and pack.kv.tokens == len(pack.token_ids) for pack in packs)
        holds("`kv` gives the KV of the wanted tokens of each plan, in order.", is_whole)
    if "logits" in supports:
        prefilled = session.prefill(_ASKED)
        logits = _logits(prefilled)
        holds("`first_logits` has one dimension.", logits.dim() == 1)
        holds("The first greedy token has the largest logit.", int(logits.argmax()) == plain.token_ids[0])
    if {"logits", "bitwise"} <= supports:
        same = _are_alike(session, prefilled, session.prefill(_ASKED, reuse=False))
        holds("With `bitwise`, reused KV gives the same bits as computed KV.", same)
    if {"attention", "kv"} <= supports:
        packs = list(session.build_packs(_FACTS, compiled_for="system", progress=False))
        selected = session.generate(_ASKED, packs=packs, composer="select:packs=1", max_tokens=_TOKENS)
        holds("With `attention`, a question is answered from some of its packs.", selected.usage.unread_packs == 1)
    if "sampling" in supports:
        sampled = [session.generate(_ASKED, temperature=1.0, seed=7, max_tokens=_TOKENS).token_ids for _ in range(2)]
        holds("Equal seeds choose equal tokens.", sampled[0] == sampled[1])
    if "grammar" in supports:
        answer = session.generate(_ASKED, response_schema=_SCHEMA, max_tokens=32).text
        holds("With a grammar, the answer is of this grammar.", answer.replace(" ", "") == '{"n":7}')
    if {"steer", "kv"} <= supports:
        steering = session.make_steering([_FACTS], progress=False)
        session.generate(_ASKED, steering=(steering, 8.0), scope="prompt", max_tokens=_TOKENS)
        again = session.generate(_ASKED, max_tokens=_TOKENS)
        holds("Steered KV is not used in plain prompts.", again.token_ids == plain.token_ids)
    if isinstance(caching := session.engine, HasCache):
        plan = _plan(session, max_tokens=1)
        with closing(session.engine.run(plan)) as stream:
            next(stream)
            holds("A prompt that was read is in the prefix tree.", caching.cached_tokens(plan) > 0)
        caching.clear_cache()
        holds("`clear_cache` drops what is not in use.", caching.cached_tokens(plan) == 0)


def _check_logprobs(session: Session) -> None:
    if "logprobs" not in session.engine.supports:
        return
    plain = session.generate(_ASKED, max_tokens=_TOKENS)
    scored = session.generate(_ASKED, top_logprobs=2, max_tokens=_TOKENS)
    logprobs = scored.logprobs or ()
    holds("Log-probabilities do not change the answer.", scored.token_ids == plain.token_ids)
    ids = tuple(token.token_id for token in logprobs)
    holds("There is a log-probability per token, of this token.", ids == scored.token_ids)
    likeliest = [token.top[0] for token in logprobs]
    is_first = all(token.token_id == best.token_id for token, best in zip(logprobs, likeliest, strict=True))
    holds("A greedy token is the likeliest.", is_first)


def check_composer(composer: Composer, engine: Session | None = None) -> None:
    """Check the rules of `Composer` on `engine`, by default one with a tiny model.

    Raises `AssertionError` with the broken rule.
    """
    holds("A composer is a `Composer` with a `key`.", isinstance(composer, Composer))
    holds("`key` is a text that does not change.", bool(composer.key) and str(composer.key) == composer.key)
    session = engine or load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(merges=7))
    packs = list(session.build_packs(_FACTS, compiled_for="system", progress=False))
    kept = [pack.kv.clone() for pack in packs if pack.kv]
    options: dict[str, Any] = {"packs": packs, "composer": composer}
    oracle = session.prefill(_ASKED, packs=packs, reuse=False)
    one = session.prefill(_ASKED, **options | {"packs": packs[:1]})
    alone = session.prefill(_ASKED, packs=packs[:1], reuse=False)
    holds("A pack where it was compiled is exact.", _are_alike(session, one, alone))
    session.clear_cache()
    try:
        composed = session.prefill(_ASKED, **options)
    except PackError as error:
        raise AssertionError(f"`fill` returns tokens of its region. Got: {error}") from error
    plain = oracle.prompt
    moved = [span for span in plain.spans if span.pack.prefix != plain.token_ids[: span.start]]
    prompt, spans = composer.layout(plain, moved, session.host)
    holds("`layout` returns spans of the prompt.", set(spans) <= set(prompt.spans))
    holds("`layout` gives the prompt that is answered.", prompt == composed.prompt)
    approximate = 0 if composer.exact else sum(map(len, spans))
    holds("What is composed counts as approximate unless `exact`.", composed.usage.approximate_tokens == approximate)
    is_exact = _are_alike(session, composed, oracle)
    holds("An `exact` composer gives the logits of a plain prefill.", is_exact or not composer.exact)
    holds("`fill` leaves the KV of packs as it is.", all(map(_are_equal, kept, packs)))
    again = session.prefill(_ASKED, **options)
    holds("The prefix tree gives back what was composed.", _are_alike(session, again, composed))
    exact = session.prefill(_ASKED, packs=packs)
    holds("`fill` leaves KV outside of its region as it is.", _are_alike(session, exact, oracle))
    session.clear_cache()
    anew = session.prefill(_ASKED, **options)
    holds("Equal regions get equal KV each time.", _are_alike(session, anew, composed))


def _plan(session: Session, **options: Any) -> Plan:
    plan, *_ = session._planner.plan(_ASKED, Request.of(options))
    return plan


def _logits(answer: Generation) -> Tensor:
    if answer.logits is None:
        raise AssertionError("With `logits`, `first_logits` is set after the prefill.")
    return answer.logits


def _are_alike(session: Session, one: Generation, other: Generation) -> bool:
    """Whether logits are the same bits; where the engine does not support that, the same but for rounding."""
    mine, theirs = _logits(one), _logits(other)
    if "bitwise" in session.engine.supports:
        return torch.equal(mine, theirs)
    rounding = 1e-4 if mine.dtype == torch.float32 else 0.1
    return bool((mine - theirs).float().norm() <= rounding * theirs.float().norm())


def _are_equal(kv: KVTensors, pack: KnowledgePack) -> bool:
    tensors = (*pack.kv.keys, *pack.kv.values) if pack.kv else ()
    return all(map(torch.equal, (*kv.keys, *kv.values), tensors))
