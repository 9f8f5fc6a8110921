"""Tables, events and commands: the engine's data.

Start at `tables`. `events` go in, `commands` come out, and each handler gets a `context`.
"""
