"""DRF comes to its last job where guarantees guard what makes room for a gang."""

from __future__ import annotations

from pathlib import Path

from common.clock import SystemClock
from coordinator.engine.state.settings import TenantSettings
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play

TENANTS = (
    TenantSettings(name="a", weight=0.5),
    TenantSettings(name="a0", parent="a"),
    TenantSettings(name="b", guarantee_gpus=13),
    TenantSettings(name="b0", parent="b", weight=2.0, guarantee_gpus=3, borrow_limit_gpus=2),
    TenantSettings(name="b1", parent="b", weight=3.0, guarantee_gpus=1),
    TenantSettings(name="c", weight=3.0, guarantee_gpus=3),
    TenantSettings(name="c0", parent="c", guarantee_gpus=1, lend_limit_gpus=4),
    TenantSettings(name="c1", parent="c", weight=2.0, guarantee_gpus=1),
)

JOBS = """\
submit_s,duration_s,gpus,tenant,gpus_per_worker,min_workers,max_workers,priority,has_checkpoints,deadline_s
138,1200,4,c0,2,,,0,false,3600
214,300,8,c0,4,,,1,false,
218,60,8,c0,4,,,0,false,
233,3600,1,c0,1,,,0,true,10800
291,60,4,a0,4,,,0,true,
633,3600,8,b1,4,,,0,false,
698,3600,1,b0,1,,,1,true,
754,60,4,a0,4,,,0,true,
783,1200,1,a0,1,,,0,false,
823,60,2,c0,2,,,0,false,180
961,1200,1,b1,1,,,1,true,
1021,3600,1,c1,1,,,0,false,10800
1062,10,1,b0,1,,,0,true,
1510,60,8,c1,8,,,0,true,180
1644,60,4,b1,2,2,2,0,false,
1738,60,1,c1,1,1,2,0,true,
1840,1200,2,b1,2,,,1,true,
1916,1200,1,b1,1,,,0,true,
1995,300,1,b0,1,1,1,1,false,900
2040,60,1,b0,1,,,0,false,180
2221,1200,4,b0,2,,,0,true,
2404,3600,8,b1,2,4,12,0,true,10800
2947,1200,4,b0,1,,,0,false,
"""


def test_workers_that_alternate_between_nodes_do_not_come_and_go_for_ever(tmp_path: Path) -> None:
    """An elastic job stands on both nodes, and a gang wants room on one: were it given back on any,
    guarantees would leave one worker less, which the next pass would add again, without end."""
    trace = tmp_path / "jobs.csv"
    trace.write_text(JOBS)
    options = RunOptions(
        policy="drf", has_delays=False, idle_events=300, engine={"tenants": TENANTS}, check=True
    )
    done = play(read_workload(str(trace), cluster="2x8"), options, clock=SystemClock())
    assert done.result.jobs == len(JOBS.splitlines()) - 1
