"""What becomes of the packs of a request: the base of all composers, the exact one, and others by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor

from kp_core.errors import OptionError, PackError, gone
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackView
from kp_core.prompt.conversation import Turn
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.template import ChatTemplate

if TYPE_CHECKING:
    from kp_core.plan.engine import Engine
    from kp_core.plan.plan import Plan, Region

COMPOSERS = "knowledge_packs.composers"
"""Entry points of composers by name: classes, or functions that make one from parameters."""

Move: TypeAlias = Callable[[KVTensors, int, KVTensors], object]
"""Writes KV, moved by so many positions, to its place (`Rope.move`). Raises `UnsupportedRequestError` if the model's
keys cannot be moved."""
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Host:
    """What the hooks of a composer may use of a model and of a request."""

    engine: Engine
    model: ModelFingerprint
    """The model as it is now; after a change of its weights there is another host."""
    template: ChatTemplate
    attention: Callable[[Plan, int | None], Tensor | None]
    """How much the tokens behind the last region of a plan attend to each token in it, `(layers, heads, tokens)`, of so
    many first layers; `None` if a pack has no KV. Raises `UnsupportedRequestError` if the engine cannot say."""
    build: Callable[[Sequence[str]], Iterable[KnowledgePack]]
    """Compiles texts."""
    when_idle: Callable[[Callable[[], Iterable[object]]], object]
    """Runs what it yields, one step at a time, while no request is answered. Raises `ModelError` if too much waits."""
    view: PackView | None = None
    """The packs that the request may read; `view.source.blobs` is where a composer may keep what it measured."""
    excess: Callable[[Sequence[Turn]], int] = lambda _: 0
    """How many tokens these turns and the answer have more than the model has positions."""
    cautioned: set[tuple[str, str]] = field(default_factory=set)
    """Stores, and keys of composers whose `caution` was logged for them, or other warnings."""
    _memory: dict[type, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where the packs of the request lie, as `cautioned` names it."""
        return str(self.view and self.view.source.blobs)

    def remembered(self, kind: type[Made], make: Callable[[], Made]) -> Made:
        """The object of that kind, made once for the model."""
        if kind not in self._memory:
            self._memory.setdefault(kind, make())  # Of two threads, the first one's stays.
        found: Made = self._memory[kind]
        return found


@dataclass(frozen=True)
class Arrangement:
    """The turns to send, and what composes their packs.

    `unread` packs were left out. `choice` says which composer was chosen, and why, if the request left that open, or
    why this one could not choose among packs.
    """

    turns: Sequence[Turn]
    composer: Composer
    unread: int = 0
    choice: str = ""


class Composer(ABC):
    """What becomes of packs. Three hooks, of which each may be overridden: `arrange`, `layout` and `fill`.

    Packs behind the prefix they were compiled for are exact, and their KV is used without a composer.
    """

    exact: bool = False
    """Whether composed KV is what the model computes for the text at its position."""
    needs: str = "compose"
    """The capability that an engine must have for it (`CAPABILITIES`)."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Method and parameters. Composers with equal keys make equal KV, which the prefix tree shares."""

    @property
    def most(self) -> int | None:
        """The most packs of a message that it sends; `None` if it sends all."""
        return None

    def arrange(self, turns: Sequence[Turn], host: Host) -> Arrangement:  # noqa: ARG002
        """Choose, before rendering, what is sent, and what composes it. By default the turns as they are, and this."""
        return Arrangement(turns, self)

    def layout(self, prompt: Prompt, moved: Sequence[Span], host: Host) -> tuple[Prompt, Sequence[Span]]:  # noqa: ARG002
        """Choose which of the `moved` packs, those of `prompt` that do not stand behind their prefix, it composes.

        Returns the prompt, in which it may lay tokens around these packs, and their spans there. The others are
        prefilled, as all are by default. A prompt with tokens around packs is not used where something is steered.
        """
        return prompt, ()

    def fill(self, region: Region, packs: Sequence[KnowledgePack], room: KVTensors, move: Move) -> Sequence[int]:
        """Write the KV of `packs`, those of the region's spans, into `room`, the place of the region in the cache.

        Returns the tokens of packs, counted from the start of the region, that the model must compute anew. It always
        computes those between packs. Each computed token sees all tokens before it. `packs` have KV and are read-only.
        The KV depends only on the tokens before and inside the region. By default, packs are moved to their places.
        """
        for span, pack in zip(region.spans, packs, strict=True):
            if pack.kv is None:
                raise PackError(f"Got a lazy pack for the tokens {span.start}:{span.stop}; expected its KV.")
            place = room.slice(span.start - region.start, span.stop - region.start)
            move(pack.kv, span.start - len(pack.prefix), place)
        return ()

    @property
    def only_moves(self) -> bool:
        """Whether `fill` is the default, which needs nothing but the KV of packs, so that a server can do it."""
        return type(self).fill is Composer.fill

    def caution(self, host: Host) -> str:  # noqa: ARG002
        """What is logged, once for each store, where it is not `exact` and composes packs or leaves some out."""
        return (
            f"Answers with composer {self.key!r} are not those of all packs; `kp calibrate` measures how good they are "
            "on your data."
        )


@dataclass(frozen=True)
class ExactComposer(Composer):
    """Sequential composition (Knowledge Packs, arXiv 2604.03270): the answer equals that for the text, token for token.

    A pack's KV is used only behind the prefix it was compiled for. Elsewhere its tokens are prefilled, and the prefix
    tree keeps the result.
    """

    exact = True
    key = "exact"


def composer_of(name: str) -> Composer:
    """The installed composer of that name, with its parameters: `"exact"`, `"method:number=2,file=PATH"`.

    Raises `OptionError` for an unknown name or parameter, and as the composer itself.
    """
    method, _, arguments = name.partition(":")
    parameters: dict[str, Any] = {}
    for part in filter(None, arguments.split(",")):
        key, _, value = part.partition("=")
        try:
            parameters[key] = float(value)
        except ValueError:
            parameters[key] = value
    if method not in _installed():
        _installed.cache_clear()  # It may have been installed since.
    if method not in _installed():
        known = ", ".join(sorted(_installed())) or "none"
        raise OptionError(
            f"Got composer={name!r}; expected one of {known}, with parameters as in "
            "'name:parameter=value', or a `kp_core.Composer` of your own. Composers of a package are found once it is "
            f"installed; after an update in place, install it again.{gone('composer', method)}"
        )
    try:
        make: Callable[..., Composer] = _installed()[method].load()
    except (ImportError, AttributeError) as error:
        raise OptionError(f"Got composer={name!r}, which is installed but cannot be loaded: {error}.") from error
    try:
        return make(**parameters)
    except OptionError:
        raise  # It says which parameter is wrong.
    except TypeError as error:
        known = ", ".join(f"{key}=" for key in signature(make).parameters) or "no parameter"
        raise OptionError(f"Got composer={name!r}; expected {known} for {method!r}.") from error


@cache
def _installed() -> Mapping[str, EntryPoint]:
    """The composers of all packages, by name; of two with one name, the one that Python would import first."""
    return {entry.name: entry for entry in reversed(list(entry_points(group=COMPOSERS)))}
