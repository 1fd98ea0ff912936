"""Composers: what a pack's KV may stand for, in a prompt that holds several packs."""

from kp_core.compose.base import Composer, Forward
from kp_core.compose.exact import ExactComposer
from kp_core.compose.naive import NaiveComposer
from kp_core.compose.order import Order

__all__ = ["Composer", "ExactComposer", "Forward", "NaiveComposer", "Order"]
