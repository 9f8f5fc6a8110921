"""A node has no aiohttp: it is the coordinator's. nats-py imports it wherever it is, for a third of
what the start of an agent costs. Knows nothing else."""

raise ImportError("a node has no aiohttp")
