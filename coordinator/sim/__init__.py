"""The simulating driver: a heap of events and pretend nodes around the engine."""
