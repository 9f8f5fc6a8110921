"""Several jobs on the same GPUs: turns, packing by trial, and moves. Must not know who decides."""
