"""The program above each worker, alive without its agent; and the launcher for torchrun.

Standard library only: a shim stays under 12 MB. Start at `main`, then `supervisor`.
`torch_launcher` and `torch_store` run under the job's own Python.
"""
