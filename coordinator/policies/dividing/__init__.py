"""How GPUs are divided among jobs, as numbers: time, workers, goodput. Knows no policy."""
