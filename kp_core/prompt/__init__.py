"""Prompts: from messages and packs to token ids; the only place that knows chat templates."""
