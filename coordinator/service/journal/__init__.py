"""The journal of records in JetStream, its snapshots and its history.

Start at `jetstream`; `recovery` rebuilds the engine from it.
"""
