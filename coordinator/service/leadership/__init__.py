"""Which coordinator leads: a key with a time to live.

Start at `lease`, which takes and keeps the key; `renewal_thread` renews it.
"""
