"""The paper's runs by name: the changes of each to a workload, and its policy.

They are data about the paper and so stand with the workloads: no engine and no simulator names a
policy. Tables and figures are of Lyra, EuroSys'23. A scenario is played as in the paper's
simulator: nothing takes time by itself, growing costs nothing, and every spare node is lent
(`PAPER_KNOBS`; `aryl` by itself is more careful, docs/simulate.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from msgspec import Struct, structs

from common.errors import ConfigError
from coordinator.workloads.pools import node_sizes
from coordinator.workloads.records import Workload
from coordinator.workloads.scenarios import (
    Scenario,
    bootstrapped,
    heterogeneous_alone,
    scenario,
    with_ranges,
    with_wrong_estimates,
)
from coordinator.workloads.shaping import (
    RuntimeModel,
    with_any_size,
    with_checkpoint_share,
)
from coordinator.workloads.untold import with_untold

PAPER_SCALING = ":resize_cost_s=0"
PAPER_LOANS = ":elastic_base_prefers_loan=true:lend_only_on_demand=false"
PAPER_PROFILES = ":trusts_profiles=false"
"""The paper's rules where `aryl` has its own (sections 5.2, 5.3 and 6): of scaling, of loans, and
of every policy, as its scheduler takes scaling for linear also where jobs lose by it (7.2)."""

PAPER_KNOBS = f"{PAPER_SCALING}{PAPER_LOANS}{PAPER_PROFILES}"
LOANS_ALONE = f"{PAPER_LOANS}{PAPER_PROFILES}"
SCALING_ALONE = f"{PAPER_SCALING}{PAPER_PROFILES}"

PAPER = f"aryl{PAPER_KNOBS}:reclaim=cost"
"""Aryl as the paper has it."""

NAIVE_KNOBS = (
    ":resize_cost_s=0:elastic_base_prefers_loan=false:lend_only_on_demand=false"
    ":separates_groups=false:reclaim=cost:trusts_profiles=false"
)
"""Table 6: best fit alone, elastic jobs not favored on lent nodes."""

ELASTICFLOW_GPUS = 64
"""The largest size of its scaling curves, and the GPUs of its Figure 8(a)."""

BOOTSTRAP_DAYS = 10
"""Figure 12."""

Shape = Callable[[Workload, int], Workload]


class Scene(Struct, frozen=True, kw_only=True):
    """One scenario.

    policy: the paper's policy for it; another one can be chosen.
    shape: turns a workload into its own, by seed.
    tells_progress: whether jobs report progress; where estimates are wrong they must stay so.
    speedup: how its elastic jobs speed up, unless an option says otherwise.
    draws_untold: whether its jobs are those of the paper's trace, so that properties that another
        trace lacks are drawn, see `with_untold`.
    sets: options of shares (`elastic`, `fungible`, `checkpoint-share`) that its shape sets itself,
        so that they cannot be given. A draw of fungible or saving jobs is undone; a job drawn as
        elastic may keep that range, and so be another job than its name means.
    has_spanning: whether heterogeneous jobs are for both GPU types beside the fungible ones.
    """

    name: str
    description: str
    policy: str
    shape: Shape
    tells_progress: bool = True
    speedup: RuntimeModel = RuntimeModel.LINEAR
    draws_untold: bool = True
    sets: tuple[str, ...] = ()
    has_spanning: bool = False

    def of(self, workload: Workload, seed: int, *, draws_ranges: bool = True) -> Workload:
        """The workload that it plays where this one is named; the paper's own states everything.

        Args:
            draws_ranges: as `with_untold`.

        Raises:
            ValueError: it cannot be made of this workload.
        """
        if self.draws_untold:
            workload = with_untold(workload, seed, draws_ranges=draws_ranges)
        return self.shape(workload, seed)


def _plain(workload: Workload, seed: int) -> Workload:
    return workload


def _of_paper(name: Scenario) -> Shape:
    def shape(workload: Workload, seed: int) -> Workload:
        return scenario(workload, name, seed=seed)

    return shape


def _wrong(percent: int, workload: Workload, seed: int) -> Workload:
    jobs = with_wrong_estimates(workload.jobs, percent / 100, seed)
    return structs.replace(workload, jobs=jobs)


def _elastic(percent: int, workload: Workload, seed: int) -> Workload:
    nodes = node_sizes(workload.nodes)
    jobs = with_ranges(workload.jobs, percent / 100, seed, nodes=nodes)
    return structs.replace(workload, jobs=jobs)


def _heterogeneous(percent: int, workload: Workload, seed: int) -> Workload:
    return heterogeneous_alone(workload, percent / 100, seed)


def _checkpoint(percent: int, workload: Workload, seed: int) -> Workload:
    found = scenario(workload, Scenario.IDEAL, seed=seed)
    return structs.replace(found, jobs=with_checkpoint_share(found.jobs, percent / 100, seed))


def _bootstrap(name: Scenario, number: int, workload: Workload, seed: int) -> Workload:
    drawn = bootstrapped(workload, days=BOOTSTRAP_DAYS, seed=number)
    return scenario(drawn, name, seed=seed)


def _by_curve(workload: Workload, seed: int) -> Workload:
    """ElasticFlow (ASPLOS 2023): jobs name no GPUs; any number that was measured will do."""
    return structs.replace(workload, jobs=with_any_size(workload.jobs, most=ELASTICFLOW_GPUS))


BASIC, ADVANCED = _of_paper(Scenario.BASIC), _of_paper(Scenario.ADVANCED)
HETEROGENEOUS, IDEAL = _of_paper(Scenario.HETEROGENEOUS), _of_paper(Scenario.IDEAL)

SETS = {HETEROGENEOUS: ("fungible",), IDEAL: ("elastic", "fungible")}
"""By shape: `Scene.sets`. Both drop the fungible share first, so that the scenario alone decides
which jobs accept the type of inference, also on a cluster where no job can span types.
"""


def _scene(name: str, policy: str, shape: Shape, description: str) -> Scene:
    return Scene(
        name=name,
        policy=policy,
        shape=shape,
        description=description,
        sets=SETS.get(shape, ()),
        has_spanning=shape is ADVANCED,
    )


SCENES = {
    scene.name: scene
    for scene in (
        _scene("baseline", "fifo", _plain, "strict FIFO, no loans, no scaling"),
        _scene("basic", PAPER, BASIC, "21 % fungible, about 5 % elastic"),
        _scene("advanced", PAPER, ADVANCED, "basic, and 10 % heterogeneous"),
        _scene(
            "heterogeneous",
            PAPER,
            HETEROGENEOUS,
            "10 % heterogeneous, none fungible, about 5 % elastic",
        ),
        _scene("ideal", PAPER, IDEAL, "all elastic and heterogeneous at full speed"),
        _scene(
            "loan-opportunistic",
            f"opportunistic{LOANS_ALONE}",
            BASIC,
            "fungible jobs are guests of the inference cluster",
        ),
        _scene("loan-random", f"aryl-random{LOANS_ALONE}", BASIC, "loans, reclaimed at random"),
        _scene("loan-scf", f"aryl-scf{LOANS_ALONE}", BASIC, "loans, fewest jobs reclaimed first"),
        _scene("loan-aryl", f"aryl-loan{LOANS_ALONE}:reclaim=cost", BASIC, "loans, no scaling"),
        _scene("elastic-aryl", f"aryl-elastic{SCALING_ALONE}", BASIC, "scaling, no loans"),
        _scene(
            "elastic-gandiva",
            "gandiva-lyra:resize_cost_s=0:trusts_profiles=false",
            BASIC,
            "growth only while no job waits",
        ),
        _scene("elastic-afs", "afs-lyra", BASIC, "AFS as the paper has it, no loans"),
        Scene(
            name="elastic-pollux",
            policy="pollux:round_s=300:population=20:generations=250",
            shape=BASIC,
            description="Pollux, whose jobs tune their batch size, no loans",
            speedup=RuntimeModel.TUNED,
        ),
        Scene(
            name="elastic-tuned",
            policy=f"aryl-elastic{SCALING_ALONE}",
            shape=BASIC,
            description="scaling, no loans, jobs tune their batch size (Lyra+TunedJobs)",
            speedup=RuntimeModel.TUNED,
        ),
        _scene(
            "basic-random",
            f"aryl{PAPER_KNOBS}:reclaim=random",
            BASIC,
            "basic, reclaimed at random (Figure 10)",
        ),
        _scene(
            "basic-scf",
            f"aryl{PAPER_KNOBS}:reclaim=fewest-jobs",
            BASIC,
            "basic, fewest jobs reclaimed first (Figure 10)",
        ),
        _scene("naive-basic", f"aryl{NAIVE_KNOBS}", BASIC, "basic, naive placement (Table 6)"),
        _scene("naive-advanced", f"aryl{NAIVE_KNOBS}", ADVANCED, "advanced, naive placement"),
        _scene("naive-ideal", f"aryl{NAIVE_KNOBS}", IDEAL, "ideal, naive placement"),
        Scene(
            name="elasticflow-8a",
            policy="qos-elasticflow:margin=1",
            shape=_by_curve,
            description="ElasticFlow's Figure 8(a): 1 to 64 GPUs by measured curves",
            tells_progress=False,
            draws_untold=False,
            sets=("elastic",),
        ),
    )
}
"""Scenarios without a number."""


class Family(Struct, frozen=True, kw_only=True):
    """Scenarios that differ by a number at the end of their names, as in `wrong-20`.

    most: the largest number; they begin at 0.
    """

    name: str
    description: str
    policy: str
    shape: Callable[[int, Workload, int], Workload]
    most: int = 100
    tells_progress: bool = True
    sets: tuple[str, ...] = ()

    def scene(self, number: int) -> Scene:
        """The scenario of one number."""
        return Scene(
            name=f"{self.name}-{number}",
            description=self.description,
            policy=self.policy,
            shape=partial(self.shape, number),
            tells_progress=self.tells_progress,
            sets=self.sets,
        )


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="wrong",
            description="basic, this percentage of the estimates off by up to 25 % (Table 9)",
            policy=PAPER,
            shape=_wrong,
            tells_progress=False,
        ),
        Family(
            name="elastic",
            description="scaling only, this percentage of the jobs elastic (Figures 14 to 16)",
            policy=f"aryl-elastic{SCALING_ALONE}",
            shape=_elastic,
            sets=("elastic",),
        ),
        Family(
            name="heterogeneous",
            description="this percentage of the jobs heterogeneous, none fungible (Figure 11)",
            policy=PAPER,
            shape=_heterogeneous,
            sets=SETS[HETEROGENEOUS],
        ),
        Family(
            name="checkpoint",
            description="ideal, this percentage of the jobs with checkpoints (Figure 13)",
            policy=PAPER,
            shape=_checkpoint,
            sets=(*SETS[IDEAL], "checkpoint-share"),
        ),
        Family(
            name="bootstrap-baseline",
            description=f"baseline on {BOOTSTRAP_DAYS} days drawn by that seed (Figure 12)",
            policy="fifo",
            shape=partial(_bootstrap, Scenario.BASIC),
            most=999_999,
        ),
        Family(
            name="bootstrap-basic",
            description=f"basic on {BOOTSTRAP_DAYS} days drawn by that seed (Figure 12)",
            policy=PAPER,
            shape=partial(_bootstrap, Scenario.BASIC),
            most=999_999,
        ),
        Family(
            name="bootstrap-ideal",
            description=f"ideal on {BOOTSTRAP_DAYS} days drawn by that seed (Figure 12)",
            policy=PAPER,
            shape=partial(_bootstrap, Scenario.IDEAL),
            most=999_999,
            sets=SETS[IDEAL],
        ),
    )
}


def find_scene(name: str) -> Scene:
    """A scenario by name.

    Raises:
        ConfigError: an unknown name, or a number that its kind does not have; lists the valid ones.
    """
    if name in SCENES:
        return SCENES[name]
    found = re.fullmatch(r"(.+)-(\d{1,6})", name)
    family = FAMILIES.get(found[1]) if found else None
    if found is None or family is None:
        numbered = ", ".join(f"{each}-N" for each in FAMILIES)
        raise ConfigError(f"scenario: {name!r} is not one of {', '.join(SCENES)}, {numbered}")
    if int(found[2]) > family.most:
        raise ConfigError(f"scenario {name}: {found[2]}, expected 0 to {family.most}")
    return family.scene(int(found[2]))
