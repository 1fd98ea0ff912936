"""Packs: what they hold, how they are named, and how they are stored."""
