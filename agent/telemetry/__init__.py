"""The measurements in a node's report: GPUs, the load of its inference server, the machine.

Start at `sample`, one report; `collectors` run beside each other with a deadline each.
`engine_page_parser` reads the metrics page of vLLM or another engine, `engine_series` has the
series of each engine.
"""
