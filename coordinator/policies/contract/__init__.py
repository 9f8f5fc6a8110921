"""The contract: what a policy reads and returns.

Start at `snapshot` and `decisions`. `job_groups` has the fields of a job that belong together;
`index` and `free_gpus` answer what a snapshot implies.
"""
