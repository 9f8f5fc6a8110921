"""Taking lent nodes back at the least cost to jobs. Must not know why nodes are wanted."""
