"""The contract: what a policy reads and returns.

Start at `snapshot` and `decisions`; `index` and `free_gpus` answer what a snapshot implies.
"""
