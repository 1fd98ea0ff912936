"""Steering, told with what it prints."""
