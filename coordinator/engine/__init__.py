"""The engine owns all mutable cluster state: handle(event, now_s) -> commands.

Start at `engine`. `state` has the tables, events and commands. `jobs`, `nodes` and `loans` have the
handlers. `view` gives policies a snapshot and `commit` carries out their decisions. `record` is the
journal's form, and `invariants` lists the rules that hold after every event.
"""
