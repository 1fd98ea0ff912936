"""Prompts: turns messages and packs into token ids; the only place that knows chat templates."""
