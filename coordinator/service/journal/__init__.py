"""The journal of records in JetStream, its snapshots and its history.

Start at `journal_stream`; `recovery` rebuilds the engine from it.
"""
