"""The live driver: sockets, clocks and the journal around the engine.

Start at `coordinator`, then `decision_loop`. `journal` keeps, `leadership` elects, `nodes` listens
to agents, `api` answers people.
"""
