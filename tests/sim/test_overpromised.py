"""`aryl simulate --tenants`: guarantees that the cluster cannot keep are said, and played."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.small import SLICE
from tests.sim.test_cli import simulate


@pytest.mark.parametrize(("cluster", "is_said"), [("4x8", True), ("4x8+9x8", True), ("5x8", False)])
def test_guarantees_beyond_the_cluster_are_said_in_one_line(
    tmp_path: Path, cluster: str, *, is_said: bool
) -> None:
    """Those of all roots together against the training nodes; the run is played all the same."""
    file = tmp_path / "tenants.toml"
    file.write_text("".join(f'[[tenants]]\nname = "{n}"\nguarantee_gpus = 20\n' for n in "ab"))
    given = ("--workload", str(SLICE), "--cluster", cluster, "--backend", "sequential")
    done = simulate(*given, "--policy", "fifo", "--no-delays", "--tenants", str(file))
    assert done.code == 0, done.err
    line = (
        "aryl: tenants: 40 GPUs are guaranteed, and the training nodes have 32: "
        "not all guarantees can be kept at a time"
    )
    assert (line in done.err.splitlines()) == is_said
