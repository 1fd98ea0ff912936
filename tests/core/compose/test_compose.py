from dataclasses import dataclass

import pytest
import torch

import kp_methods
from kp_core import Composer, ExactComposer, ModelFingerprint, PackStore
from kp_core.errors import OptionError, PackError
from kp_core.plan.composer import _installed, composer_of
from kp_methods import AutoComposer, PacketComposer, SelectComposer, SpliceComposer
from tests.composers import Firsts
from tests.conftest import tiny_engine
from tests.kits import ARCHITECTURES, NaiveComposer, check_composer
from tests.matrix import models


@dataclass(frozen=True)
class Scaled(Composer):
    """A composer in one file: the pack's KV with its values times a factor."""

    factor: float = 1.0

    @property
    def key(self):
        return f"scaled:{self.factor}"

    def layout(self, prompt, moved, host):
        return prompt, [span for span in moved if span in prompt.spans[1:]]

    def fill(self, region, packs, room, move):
        NaiveComposer().fill(region, packs, room, move)
        for span in region.spans:
            for value in room.values:
                value[:, span.start - region.start : span.stop - region.start] *= self.factor
        return ()


class Anywhere(PacketComposer):
    """Soft tokens for all tiny models: they are as wide."""

    def check(self, fingerprint):
        pass


WIDTH = ARCHITECTURES["llama"]().hidden_size
SOFT = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
COMPOSERS = [
    ExactComposer(),
    NaiveComposer(),
    Scaled(0.5),
    SpliceComposer(),
    Anywhere(SOFT[:2], SOFT[2:], ModelFingerprint.unknown()),
    Firsts(0.3),
    Firsts(1),
]
TEXTS = ["The first island is green.", "The second island is blue."]


@pytest.fixture
def isles(tmp_path):
    """An engine with nothing in memory, a view of two packs, and questions about one and about both."""

    def make(architecture="llama", dtype=torch.float32):
        engine, store = tiny_engine(architecture, dtype), PackStore(tmp_path / f"{architecture}-{dtype}")
        engine.clear_cache()
        handles = [store.put(engine.build_pack(text, namespace="isles")) for text in TEXTS]
        one, both = f"{handles[0]}\n\nWhich?", f"{handles[0]}\n\n{handles[1]}\n\nWhich?"
        return engine, {"view": store.view("isles")}, one, both

    return make


@models
@pytest.mark.parametrize("composer", COMPOSERS, ids=lambda composer: composer.key)
def test_composers(composer, architecture, dtype, isles):
    engine, request, _, both = isles(architecture, dtype)
    check_composer(composer, engine)
    engine.clear_cache()
    found = engine.prefill(both, **request, composer=composer)
    assert found.usage.reused_tokens >= len(found.prompt.spans[0])
    assert composer.exact or not torch.equal(found.logits, engine.prefill(both, **request, reuse=False).logits)
    assert engine.prefill(both, **request, composer=composer).usage.computed_tokens == 0


def test_what_is_installed_has_a_row():
    names = {"auto", "exact", "packet", "select", "splice"}
    assert names <= set(_installed())
    assert {composer_of(name).key.partition(":")[0] for name in names} == names
    kinds = {type(composer_of(name)) for name in names}
    exported = {getattr(kp_methods, name) for name in kp_methods.__all__ if name.endswith("Composer")}
    assert exported | {ExactComposer} == kinds
    assert all(
        any(isinstance(composer, kind) for composer in COMPOSERS) for kind in kinds - {AutoComposer, SelectComposer}
    ), "every one that makes KV has a row"


def test_two_settings_of_one_composer_share_nothing_but_what_is_exact(isles):
    engine, request, _, both = isles()
    half = engine.prefill(both, **request, composer=Scaled(0.5))
    double = engine.prefill(both, **request, composer=Scaled(2.0))
    assert not torch.equal(half.logits, double.logits)
    # The first pack is exact for both; what stands between packs, and the question, are computed with each.
    outside = len(double.prompt) - double.prompt.spans[0].stop - len(double.prompt.spans[1])
    assert double.usage.computed_tokens == outside <= half.usage.computed_tokens
    engine.clear_cache()
    assert torch.equal(engine.prefill(both, **request, composer=Scaled(2.0)).logits, double.logits)


def test_a_composer_that_names_tokens_outside_of_its_region_is_named(isles):
    engine, request, _, both = isles()

    @dataclass(frozen=True)
    class Beyond(Scaled):
        def fill(self, region, packs, room, move):
            return [-1]

    with pytest.raises(PackError, match=r"'scaled:1.0' wants the tokens -1 to \d+ of a region computed"):
        engine.prefill(both, **request, composer=Beyond())
    assert engine.prefill(both, **request).usage.approximate_tokens == 0


def test_what_is_no_composer_is_refused_at_the_call(isles):
    engine, request, _, both = isles()
    with pytest.raises(OptionError, match="Got composer='exakt'; expected one of auto, exact, packet, select, splice"):
        engine.stream(both, **request, composer="exakt")
    with pytest.raises(OptionError, match=r"Got composer='naive'. It is gone in 0.3; 'splice' moves packs"):
        engine.stream(both, **request, composer="naive")
    with pytest.raises(OptionError, match=r"Got composer='select:pack=1'; expected packs=, least= for 'select'\."):
        engine.stream(both, **request, composer="select:pack=1")
    with pytest.raises(OptionError, match=r"Got composer=7; expected a composer: its name, or a `kp_core.Composer`"):
        engine.stream(both, **request, composer=7)
    with pytest.raises(OptionError, match=r"Got composer=<class .*ExactComposer'>; expected a composer: its name, or"):
        engine.stream(both, **request, composer=ExactComposer)
