"""Gandiva (OSDI'18): jobs that share GPUs by turns and by packing. Must not know the engine."""
