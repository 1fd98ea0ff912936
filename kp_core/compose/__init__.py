"""Composers: what a pack's KV may stand for, in a prompt that holds several packs."""

from kp_core.compose.base import Composer, Forward, Region, join
from kp_core.compose.blend import BlendComposer
from kp_core.compose.exact import ExactComposer
from kp_core.compose.naive import NaiveComposer
from kp_core.compose.names import composer_of
from kp_core.compose.packet import PacketComposer, laid_out
from kp_core.compose.splice import SpliceComposer
from kp_core.compose.wrapper import Wrapper, load_wrapper, save_wrapper

__all__ = [
    "BlendComposer",
    "Composer",
    "ExactComposer",
    "Forward",
    "NaiveComposer",
    "PacketComposer",
    "Region",
    "SpliceComposer",
    "Wrapper",
    "composer_of",
    "join",
    "laid_out",
    "load_wrapper",
    "save_wrapper",
]
