"""Fake GPUs scripted by a file, for `--fake-nvml`, the demo and the tests.

Start at `fleet`, which reads the file; `nvml` answers as pynvml does.
"""
