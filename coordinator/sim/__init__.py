"""The simulating driver: a heap of events and pretend nodes around the engine.

`inputs` reads what a person asks for, `run` plays it, `report` measures and draws.
"""
