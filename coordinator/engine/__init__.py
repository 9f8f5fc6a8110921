"""The engine: the one owner of mutable cluster state; handle(event, now_s) -> commands.

Start at `engine`. `state` has the tables and what goes in and comes out; `jobs`, `nodes` and
`loans` have the handlers. `view` shows policies a snapshot, `commit` carries out what they decide,
`record` keeps it, `invariants` says what must hold.
"""
