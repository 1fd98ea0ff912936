"""Packs: what they are, how they are named, and how they are kept."""

from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles, strip_handles
from kp_core.packs.pack import Head, KnowledgePack
from kp_core.packs.store import PackStore

__all__ = ["Handle", "Head", "KnowledgePack", "ModelFingerprint", "PackStore", "find_handles", "strip_handles"]
