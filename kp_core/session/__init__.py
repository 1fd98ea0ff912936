"""Sessions: messages in, answers out, over any engine."""
