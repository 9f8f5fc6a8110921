"""Words in a worker's error that say whose fault it is. Must not know who writes or reads them."""

from __future__ import annotations

NODE_FAULT = "node fault"
"""How the error of a worker begins that its node, not its job, ended."""
STORAGE_SILENT = "the storage did not answer"
"""In the error of a start, or of a look before it: what hangs may be the job's own."""
