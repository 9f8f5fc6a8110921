"""One run and many: simulated nodes, simulated time, the real engine.

Start at `play`. `simulation` is the driver, and `compare` plays many runs over cores.
"""
