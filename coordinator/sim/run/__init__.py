"""One run and many: pretend nodes, simulated time, the engine.

Start at `play`; `simulation` is the driver, `compare` plays many runs over cores.
"""
