"""GPUs as NVML and the kernel log report them, read in a child process.

Start at `reader`, the agent's view; `nvml_child` is the process, `nvml` the only module that
imports pynvml. `fake` stands in for all of it.
"""
