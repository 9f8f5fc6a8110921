"""The engine owns all mutable cluster state: handle(event, now_s) -> outcome.

Start at `engine`. `state` has the tables, events and commands. `jobs`, `nodes` and `loans` have the
handlers, and `follow_ups` lists the rules that apply after each of them. `view` and `job_views`
give policies a snapshot, and `commit` carries out their decisions. `explain` answers people and
changes nothing. `record` is the journal's form, and `invariants` lists the rules that hold after
every event.
"""
