"""Tables, events and commands: the data of the engine.

Start at `tables`; `events` go in, `commands` come out, a handler gets a `context`.
"""
