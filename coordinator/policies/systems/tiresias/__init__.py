"""Tiresias (NSDI'19): least attained service first. Must not know the engine."""
