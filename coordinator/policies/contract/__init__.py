"""What a policy reads and returns: snapshot, decisions, estimates.

Start at `snapshot` and `decisions`; `index` and `free_gpus` answer what a snapshot implies.
"""
