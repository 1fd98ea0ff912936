"""Engines run models; each implementation has its own module, imported when it is asked for."""
