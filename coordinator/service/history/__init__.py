"""The history of a cell as people ask for it: an index of its lines, and what it adds up to."""
