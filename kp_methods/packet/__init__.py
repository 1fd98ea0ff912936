"""Packs between trained soft tokens (KV Packet, arXiv 2604.13226)."""

from kp_methods.packet.composer import PacketComposer

__all__ = ["PacketComposer"]
