"""The measurements in a node's report: GPUs, the load of its inference server, the machine.

Start at `sample`, one report; `collectors` run beside each other with a deadline each. `inference`
reads a metrics page, `engines` has the series of each inference engine.
"""
