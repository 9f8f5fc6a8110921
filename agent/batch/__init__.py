"""Runs a batch script of Slurm's form on a worker, and its steps. Must not need any package."""
