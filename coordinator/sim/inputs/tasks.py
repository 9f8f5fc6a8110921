"""Tasks from a person's options: scenarios, policies and seeds."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from common.errors import ConfigError
from coordinator import plugins
from coordinator.policies.registry import COMPARED
from coordinator.policies.registry import policy as find_policy
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import parse_seeds
from coordinator.sim.run.compare import Task
from coordinator.workloads.named import seed_of
from coordinator.workloads.paper_runs import Scene, find_scene
from coordinator.workloads.shaping import RuntimeModel

DEFAULT_POLICIES = "fifo,aryl"
ALL = "all"


def _listed(option: str, text: str, hint: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not any(names):
        raise ConfigError(f"{option}: none named; {hint}")
    if not all(names):
        raise ConfigError(f"{option}: {text!r} has an empty name; {hint}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{option}: {', '.join(twice)} is given twice")
    return names


def plays(scenario: str | None, policy: str | None) -> list[tuple[Scene | None, str]]:
    """Scenarios and policies: each scenario under its own, or under those that are named.

    Raises:
        ConfigError: an unknown name, one twice, or none.
    """
    if scenario is None:
        scenes: Sequence[Scene | None] = (None,)
    else:
        listed = _listed("scenario", scenario, "docs/simulate.md lists them")
        scenes = [find_scene(name) for name in listed]
    if scenario is not None and policy is None:
        return [(scene, scene.policy) for scene in scenes if scene is not None]
    names = _policies(DEFAULT_POLICIES if policy is None else policy)
    return [(scene, name) for scene in scenes for name in names]


def _policies(text: str) -> tuple[str, ...]:
    """The policies that `--policy` names, each one that there is."""
    names = _listed(
        "policy", ",".join(COMPARED) if text == ALL else text, "`aryl policies` lists them"
    )
    if ALL in {name.partition(":")[0] for name in names} and text != ALL:
        raise ConfigError(
            f"policy: {ALL!r} stands for one of each system; it is named alone, without knobs"
        )
    plugins.load()
    for name in names:
        find_policy(name, also=(ALL,))
    return names


def seeds_of(seed: int | None, seeds: str | None) -> tuple[int | None, ...]:
    """One seed, several, or None where neither is given.

    Raises:
        ConfigError: both are given, or as `parse_seeds`.
    """
    if seed is not None and seeds is not None:
        raise ConfigError("seeds: give --seed or --seeds, not both")
    return (seed,) if seeds is None else parse_seeds(seeds)


def refuse_idle(tasks: Sequence[Task]) -> None:
    """Reject options that would have no effect.

    Raises:
        ConfigError: a pre-run although jobs fail in no run, so that none asks for one; or as
            `Task.check_shares`.
    """
    for task in tasks:
        task.check_shares()
    asked = [task.options for task in tasks if task.options.prerun_s is not None]
    if asked and all(options.failures == FailureSource.NONE for options in asked):
        raise ConfigError(
            f"prerun: {asked[0].prerun_s:g} decides nothing without --failures: only jobs that may "
            "fail ask for a pre-run"
        )


def tasks(
    base: Task,
    played: Sequence[tuple[Scene | None, str]],
    seeds: Sequence[int | None],
    *,
    delays: bool | None,
    speedup: RuntimeModel | None,
) -> list[Task]:
    """The tasks of `base` under each scenario and policy, with each seed.

    Args:
        delays, speedup: None: as in the scenario; without one there are delays, and jobs speed up
            in proportion.
    """
    return [
        structs.replace(
            base,
            seed=seed,
            scenario=None if scene is None else scene.name,
            options=structs.replace(
                base.options,
                policy=name,
                seed=seed_of(base.workload, seed),
                has_delays=scene is None if delays is None else delays,
                speedup=speedup or (RuntimeModel.LINEAR if scene is None else scene.speedup),
                tells_progress=scene is None or scene.tells_progress,
            ),
        )
        for scene, name in played
        for seed in seeds
    ]
