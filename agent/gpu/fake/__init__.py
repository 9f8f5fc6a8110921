"""GPUs that a file scripts, for `--fake-nvml`, the demo and the tests.

Start at `fleet`, which reads the file; `nvml` answers as pynvml does.
"""
