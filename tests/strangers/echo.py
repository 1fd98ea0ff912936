"""An engine of somebody else: a package with entry points of its own, which `load_engine` finds by name."""

from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.plan.engine import TokenStream


class Echo:
    """Says the prompt again, from its first token on."""

    supports, lacks, max_positions = frozenset(), {}, 512
    identity = ModelFingerprint.unknown()

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def run(self, plan):
        return TokenStream(lambda _: iter(plan.prompt.token_ids[: plan.token_budget]))

    def kv(self, plans):
        raise NotImplementedError


def load(model, *, tokenizer):
    del model
    return Echo(tokenizer)
