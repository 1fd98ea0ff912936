"""The demo: a small model answers questions about a world it cannot know, from text and from packs."""
