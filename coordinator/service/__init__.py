"""The live driver: sockets, clocks and the journal around the engine."""
