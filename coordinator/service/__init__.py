"""The live driver: sockets, clocks and the journal around the engine.

Start at `coordinator`, then `decision_loop`. `journal` stores, `leadership` elects, `nodes`
receives from agents, `api` answers people.
"""
