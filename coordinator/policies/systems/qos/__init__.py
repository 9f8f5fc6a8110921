"""Deadlines: predicted, promised, met. Must not know the engine."""
