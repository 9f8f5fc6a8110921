"""Every knob of a joint policy, turned by itself: it decides something, or is refused.

Knobs of bundles have a file of their own. Must not know what a knob is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from random import Random

import pytest
from msgspec import json, structs

from common.errors import ConfigError
from common.model import Pool
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.contract.decisions import Decision
from coordinator.policies.policy import knobs_of, turned
from coordinator.policies.registry import POLICIES, Added, add, policy
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.workloads.records import LoadSeries, NodeGroup, TraceJob, Workload
from coordinator.workloads.shaping import RuntimeModel

# --- the cell -----------------------------------------------------------------------------------

UNTIL_S = 1500.0


GB = 1 << 30


MODELS = ("vgg16", "resnet50", "bert", "deepspeech2", "")


TENANTS = (TenantSettings(name="a", guarantee_gpus=14), TenantSettings(name="b", guarantee_gpus=6))


NODES = (
    NodeGroup(
        count=2, gpus=8, gpu_type="V100", nodes_per_rack=1, cpus=64, memory_bytes=128 * GB
    ),
    NodeGroup(count=1, gpus=4, gpu_type="V100", cpus=32, memory_bytes=64 * GB),
    NodeGroup(
        count=4, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE, cpus=64, memory_bytes=128 * GB
    ),
)  # fmt: skip


LOAD = LoadSeries(name="chat", step_s=300.0, values=(0.3, 0.1, 0.5, 0.9, 0.4, 0.2))


def _job(draw: Random, number: int, gpus: int, at_s: float) -> TraceJob:
    is_elastic = draw.random() < 0.5
    each = draw.choice((1, gpus)) if gpus > 1 else 1
    return TraceJob(
        job_id=f"j{number:02}",
        submit_s=at_s,
        duration_s=float(draw.choice((60, 200, 400, 700))),
        gpus=gpus,
        tenant=draw.choice("ab"),
        model=draw.choice(MODELS),
        gpus_per_worker=each,
        min_workers=gpus // each,
        max_workers=gpus // each * (3 if is_elastic else 1),
        deadline_s=float(draw.choice((400, 900, 2000))) if draw.random() < 0.6 else None,
        has_checkpoints=draw.random() < 0.7,
        priority=0 if draw.random() < 0.8 else 1,
        app=f"app{number % 4}" if draw.random() < 0.5 else "",
        gpu_types=("V100", "T4") if draw.random() < 0.5 else ("V100",),
        cpus=gpus * draw.choice((2, 8)),
        memory_bytes=gpus * draw.choice((1, 20)) * GB,
    )


@cache
def _workload(seed: int) -> Workload:
    """A dozen jobs and some, of two tenants, within two minutes: gangs, elastic ones, deadlines,
    apps, skewed models, priorities, jobs that never save, and an hour of service."""
    draw, at_s = Random(seed), 0.0
    jobs: list[TraceJob] = []
    for number in range(12 + seed % 7):
        gpus = draw.choice((1, 1, 2, 2, 4, 4, 8))
        at_s += draw.choice((0.0, 5.0, 20.0))
        jobs.append(_job(draw, number, gpus, at_s))
    return Workload(name="s", jobs=tuple(jobs), loads=(LOAD,), nodes=NODES, length_s=UNTIL_S)


class _OtherError(Exception):
    """A decision that was not made before."""


def _played(name: str, seed: int, before: tuple[bytes, ...] | None = None) -> tuple[bytes, ...]:
    """What a policy decides, reasons aside; with `before` only up to the first other decision."""
    options = RunOptions(policy=name, speedup=RuntimeModel.LOSSY, engine={"tenants": TENANTS})
    stage = Stage(_workload(seed), options)
    said: list[bytes] = []

    def hear(made: Sequence[Decision]) -> None:
        for each in made:
            at_s = round(stage.sim.loop.now_s, 3)
            said.append(json.encode((at_s, structs.replace(each, reason=""))))
            if before is not None and said[-1] not in before[len(said) - 1 : len(said)]:
                raise _OtherError

    stage.sim.hear = hear
    stage.sim.begin()
    with suppress(_OtherError):
        stage.sim.run(UNTIL_S)
    return tuple(said)


# --- the knobs ----------------------------------------------------------------------------------

OTHER = {
    **{"lease_s": "60", "seed": "5", "slice_s": "20", "jobs_per_gpu": "1", "rest_s": "0"},
    **{"defrag_free_ratio": "0.1", "grow_after_s": "600", "quiet_s": "900", "round_s": "17"},
    **{"least_turn_ratio": "0", "spare": "even", "solve_s": "0", "tick_s": "90", "f": "0"},
    **{"refuse_s": "600", "hoard_s": "1", "hold_s": "5", "back_off_s": "5", "tries": "1"},
    **{"preempt_ratio": "0", "holders": "0", "prerun_gpus": "6", "power": "1", "history": "1"},
    **{"restart_s": "600", "population": "2", "generations": "1", "patience": "1"},
    **{"rest_rounds": "0", "margin": "2", "slack_ratio": "1", "resize_every_s": "0"},
    **{"resize_cost_s": "600", "slot_s": "5", "fairness": "0", "remote_ratio": "0.1"},
    **{"srtf_weight": "0", "spread": "0.5", "payment": "whole", "horizon": "good"},
    **{"aim": "first", "alone": "cluster", "limits": "100", "promote": "0.5"},
    **{"line": "first-start", "pack_limit": "0", "services": "50/1000", "delta_gpu_s": "5"},
    **{"threshold": "1", "timeout_s": "5", "grows_at_most": "null"},
}
"""A value of each knob that no policy has by default; of a switch it is the other one."""


DRAWN = {
    **{"afs-p": 2, "qos": 28, "qos-elasticflow": 9, "qos-edf": 9, "gandiva": 11},
    **{"gandiva-sets": 1, "pollux": 7, "las": 7, "themis-lp": 4, "philly": 1, "themis": 6},
    **{"themis-simple": 2, "tiresias": 5, "tiresias-dlas": 11, "tiresias-gittins": 5},
    **{"drf": 3, "mesos": 1, "tetris": 5, "yarn-fair": 8},
}
"""The seed of the jobs on which most of a policy's knobs decide something."""


ALONE = {
    "gandiva:migrates": (4, "false"),
    "gandiva:packs": (16, "false"),
    "philly:holders": (4, "0"),
    "pollux:spans_apart": (1, "false"),
    "qos-elasticflow:restart_s": (9, "0"),
    "qos-elasticflow:slot_s": (12, "5"),
    "tetris:fairness": (1, "0.9"),
    "themis-simple:aim": (3, "first"),
    "themis:aim": (2, "first"),
    "themis:patience": (6, "0"),
    "themis:payment": (27, "none"),
    "tiresias-dlas:mixes_units": (6, "false"),
}
"""Knobs that need other jobs, or another value: both."""


UNSEEN = {
    "gandiva:defrag_free_ratio": "jobs rest ten minutes before they move; gandiva/test_migration",
    "las:spare": "few programs have two optima, and whole rounds hide it; gavel/test_time_shares",
    "pollux:rest_rounds": "a search anew finds what the last one found; pollux/test_policy",
    "qos-edf:largest": "no job here is slower with more workers; qos/test_policy",
    "qos-elasticflow:migrates": "no share here lies in pieces that others could clear; "
    "qos/test_moves",
    "themis:horizon": "these jobs end within a lease; themis/test_arbiter",
    "yarn-fair:preempts": "no queue here has too little for long; test_yarn",
}
"""Knobs that decide nothing here, why, and which tests show that they do."""


JOINT = [name for name in POLICIES if name in DRAWN]


def _turned(name: str) -> Iterator[tuple[str, int, str]]:
    """Each knob of a policy, the seed of the jobs to turn it with, and to what."""
    knobs = POLICIES[name].knobs
    for knob in knobs_of(POLICIES[name]):
        now = getattr(knobs, knob)
        other = str(not now).lower() if isinstance(now, bool) else OTHER[knob]
        yield knob, *ALONE.get(f"{name}:{knob}", (DRAWN[name], other))


@cache
def _base(name: str, seed: int) -> tuple[bytes, ...]:
    return _played(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINT)
def test_each_knob_alone_decides_something_or_is_refused(name: str) -> None:
    """With the others as they are; a knob that neither changes a decision of this cell nor is
    refused stands in the table with the reason."""
    idle: set[str] = set()
    for knob, seed, value in _turned(name):
        text = f"{name}:{knob}={value}"
        try:
            policy(text)
        except ConfigError as refused:
            assert "decides nothing" in str(refused) or "together with" in str(refused), refused
            continue
        before = _base(name, seed)
        if _played(text, seed, before) == before:
            idle.add(f"{name}:{knob}")
    assert idle == {each for each in UNSEEN if each.partition(":")[0] == name}


def test_no_joint_policy_with_knobs_is_forgotten() -> None:
    """A new one gets its jobs in the table; bundles have rules for knobs."""
    joint = {name for name, made in POLICIES.items() if not isinstance(made.knobs, Rules)}
    assert {name for name in joint if knobs_of(POLICIES[name])} == DRAWN.keys()
    assert {each.partition(":")[0] for each in (*ALONE, *UNSEEN)} <= DRAWN.keys()


@pytest.fixture
def _nothing_added() -> Iterator[None]:
    yield
    add(())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "knob"),
    [
        ("tiresias:limits=", "promote=0.5"),
        ("tiresias:limits=:line=entry", "mixes_units=true"),
        ("tiresias-gittins", "delta_gpu_s=5"),
        ("tiresias-gittins:services=50/1000", "history=1"),
        ("tiresias-gittins:limits=", "services=50/1000"),
        ("tiresias-gittins:limits=", "subtracts_age=false"),
    ],
)
@pytest.mark.usefixtures("_nothing_added")
def test_what_tiresias_refuses_would_have_changed_no_decision(name: str, knob: str) -> None:
    """Beside the knobs in its name, which leave it nothing to decide."""
    base, *texts = name.split(":")
    with pytest.raises(ConfigError, match=f"{knob} decides nothing: it needs "):
        policy(f"{name}:{knob}")
    made = turned(POLICIES[base], "made-for-a-test", [*texts, knob], is_whole=False)
    add([Added(name="made-for-a-test", origin="tests", made=made)])
    seed = DRAWN["tiresias"]
    assert _played("made-for-a-test", seed) == _base(name, seed)
