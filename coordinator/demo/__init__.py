"""A whole cell on one machine: real processes around pretend GPUs, fed from real traces.

May use everything below it; nothing below may know that a demo exists, so that what `aryl up`
shows is the product and not a special case of it.
"""
