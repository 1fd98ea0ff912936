"""Packs: what they are, how they are named, and how they are kept."""

from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles, strip_handles
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore

__all__ = ["Handle", "KnowledgePack", "ModelFingerprint", "PackStore", "Prefix", "find_handles", "strip_handles"]
