"""Packs: what they are, how they are named, and how they are kept."""
