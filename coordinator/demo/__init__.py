"""A whole cell on one machine: real processes around pretend GPUs, fed from real traces.

The demo may use everything below it; nothing below may know that a demo exists. `aryl up` therefore
shows the product and not a special case of it.
"""
