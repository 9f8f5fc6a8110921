"""The processes of jobs on this node: started, adopted, stopped and reported.

Start at `shim_runner`, which runs each worker under a shim; `runner` is the protocol that it
implements, `lost` finds workers that the agent has no record of.
"""
