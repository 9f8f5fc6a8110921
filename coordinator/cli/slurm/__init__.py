"""Slurm's commands over Aryl's API: `aryl-sbatch`, `aryl-squeue` and the others.

`main` is the entry of all of them, and `cell` asks the coordinator. One module per command. The
forms that a job's node reads as well stand in `common.slurm`. These commands start often, so they
load neither typer nor rich.
"""
