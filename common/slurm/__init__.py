"""The forms of Slurm that both sides know: options, times, node lists, patterns of file names.

Pure, and on the standard library alone: a job's node reads them without any package.
"""
