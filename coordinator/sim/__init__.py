"""The simulator: the engine, driven by a heap of events and simulated nodes.

`inputs` reads the options, `run` plays them, and `report` measures and draws.
"""
