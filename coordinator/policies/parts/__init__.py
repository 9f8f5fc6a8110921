"""What at least two schedulers share.

Start at `grants`, which places what a scheduler gave; `memory` is what a policy keeps between
passes.
"""
