"""`sbatch`: what a script and its options mean as a job, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.model import JobState
from common.plans import Plan, PlanKind, Planned
from common.slurm.options import Kind
from coordinator.cli.slurm.node_options import features, terms
from coordinator.cli.slurm.sbatch_options import TABLE
from tests.cli.slurm.fake_slurm import A100, H100, cell, refused, row, sent, slurm
from tests.tables import each_row

SCRIPT = """#!/bin/bash
#SBATCH --job-name=from.script
#SBATCH -N 2 --gpus-per-node=4   # two words and a comment
 #SBATCH --comment=indented-lines-are-no-directives
#SBATCH --time=30

echo body
#SBATCH --time=99
"""


def test_a_script_is_submitted_with_the_options_of_its_lines_and_flags_win() -> None:
    """Directives end at the first command, and the text travels with the job."""
    of = cell()
    found = slurm(of, "sbatch", "--time=1:00:00", "-", "a b", types=SCRIPT)
    assert (found.code, found.out) == (0, "Submitted batch job 17\n")
    spec = sent(of)
    assert spec.command[:2] == ("/bin/sh", "-c")
    assert spec.command[3:] == (SCRIPT, "a b")
    assert (spec.name, spec.env["SLURM_JOB_NAME"]) == ("from_script", "from.script")
    assert (spec.workers.min, spec.workers.max, spec.gpus_per_worker) == (2, 2, 4)
    assert spec.time_limit_s == 3600.0
    assert "SLURM_JOB_COMMENT" not in spec.env


@each_row(
    "options, workers, tasks, gpus",
    [
        ("", (1, 1), 1, 1),
        ("-N2", (2, 2), 1, 1),
        ("--nodes=2-8 --gpus-per-node=4", (2, 8), 1, 4),
        ("-n8 -N2 --gpus-per-task=1", (2, 2), 4, 4),
        ("-n8 --ntasks-per-node=4", (2, 2), 4, 1),
        ("-n2 -G 2", (1, 1), 2, 2),
        ("--gpus=8 --nodes=2", (2, 2), 1, 4),
        ("--gres=gpu:2", (1, 1), 1, 2),
        ("--gres=gpu", (1, 1), 1, 1),
        ("--gres=gpu:h100:2 --gpus-per-node=2", (1, 1), 1, 2),
        ("--gres=none -G3", (1, 1), 1, 3),
        ("-G2 --ntasks-per-gpu=3", (1, 1), 6, 2),
    ],
)
def test_a_node_is_a_worker_and_tasks_are_processes_of_it(
    options: str, workers: tuple[int, int], tasks: int, gpus: int
) -> None:
    """Only a range of nodes makes a job elastic."""
    of = cell()
    assert slurm(of, "sbatch", *options.split(), "--wrap=true").code == 0
    spec = sent(of)
    assert (spec.workers.min, spec.workers.max) == workers
    assert (int(spec.env["ARYL_BATCH_TASKS"]), spec.gpus_per_worker) == (tasks, gpus)


@each_row(
    "options, field, value",
    [
        ("-c4 -n2", "cpus_per_worker", 8),
        ("--cpus-per-gpu=3 -G2", "cpus_per_worker", 6),
        ("--mem=500", "memory_bytes_per_worker", 500 << 20),
        ("--mem=4GB", "memory_bytes_per_worker", 4 << 30),
        ("--mem-per-cpu=1G -c4", "memory_bytes_per_worker", 4 << 30),
        ("--mem-per-gpu=1T -G2", "memory_bytes_per_worker", 2 << 40),
        ("-t 1-2:3:4", "time_limit_s", 93_784.0),
        ("-t UNLIMITED", "time_limit_s", None),
        ("--priority=7", "priority", 7),
        ("--nice=5", "priority", -5),
        ("--nice", "priority", -100),
        ("-D sub", "workdir", "sub"),
        ("-J nf-task_(1)", "name", "nf-task__1_"),
        ("-C nvlink&rack=r7", "require", ("nvlink", "rack=r7")),
        ("-C (rack=r7|rack=r8)&nvlink", "require", ("rack=r7|rack=r8", "nvlink")),
        ("-C ib|nvlink", "require", ("ib|nvlink",)),
        ("-x n[1-3,7]", "exclude_nodes", ("n1", "n2", "n3", "n7")),
        ("--nodelist=n[01-02] -N2", "require_nodes", ("n01", "n02")),
    ],
)
def test_options_become_fields_of_the_job(options: str, field: str, value: Any) -> None:
    """Each has the meaning that sbatch(1) gives it."""
    of = cell()
    assert slurm(of, "sbatch", *options.split(), "--wrap=true").code == 0
    found = getattr(sent(of), field)
    assert found == value or (field == "workdir" and found.endswith("/sub"))


def test_a_partition_and_a_gres_name_gpu_types_of_the_cell() -> None:
    """By the whole name, the partition's, or a word of it such as h100."""
    for options, types in (
        ("-p all", ()),
        ("-p H100_80GB_HBM3", (H100,)),
        ("-p a100", (A100,)),
        ("--gres=gpu:h100:1", (H100,)),
        ("-p h100,a100 -G a100:2", (A100,)),
    ):
        of = cell()
        assert slurm(of, "sbatch", *options.split(), "--wrap=true").code == 0
        assert sent(of).gpu.types == types, options


def test_signal_sets_the_grace_and_the_signal_of_the_script() -> None:
    """Nextflow's and submitit's forms."""
    for text, name, grace_s in (("USR2@90", "USR2", 90.0), ("B:SIGUSR1", "B:USR1", 60.0)):
        of = cell()
        assert slurm(of, "sbatch", f"--signal={text}", "--wrap=true").code == 0
        spec = sent(of)
        assert (spec.env["ARYL_BATCH_SIGNAL"], spec.checkpoint.grace_s) == (name, grace_s)
        assert spec.checkpoint.signal == "SIGTERM"


def test_the_submitter_s_variables_travel_but_secrets_and_those_of_its_own_job() -> None:
    """Every user of a cell can read the variables of a job."""
    environ = {"A": "1", "HF_TOKEN": "x", "SLURM_JOB_ID": "3", "RANK": "0", "SBATCH_GPUS": "2"}
    of = cell()
    found = slurm(of, "sbatch", "--wrap=true", environ=environ)
    assert "HF_TOKEN" in found.err
    env = sent(of).env
    assert env["A"] == "1"
    assert not {"HF_TOKEN", "SLURM_JOB_ID", "RANK", "SBATCH_GPUS"} & set(env)
    assert sent(of).gpus_per_worker == 2
    of = cell()
    slurm(of, "sbatch", "--export=A,HF_TOKEN,B=2", "--wrap=true", environ=environ)
    env = sent(of).env
    assert (env["A"], env["HF_TOKEN"], env["B"]) == ("1", "x", "2")
    assert "ARYL_CELL" not in env


@each_row(
    "options, says",
    [
        ("--qos=high", "--qos is not supported"),
        ("--exclude=n[1", "--exclude: 'n[1': brackets do not match"),
        ("--nodelist=./hosts", "--nodelist: './hosts', expected names of nodes; no file is read"),
        ("--nodelist=n1 -N2", "--nodelist: 'n1' names 1, and the job has 2 nodes"),
        ("--constraint=a&b|c", "--constraint: 'a&b|c', expected features joined by & or by |"),
        ("--constraint=a*2", "there are no counts (*), ! and []"),
        ("--begin=now+1hour", "--begin is not supported"),
        ("--nosuch=1", "unrecognized option '--nosuch'"),
        ("--gpus=3 -N2", "3 GPUs do not spread evenly over 2 nodes"),
        ("--gpus=0", "at least one GPU"),
        ("-n3 -N2", "3 tasks do not spread evenly over 2 nodes"),
        ("-N1-2 -n2", "give --ntasks-per-node"),
        ("-N4-2", "expected MIN-MAX"),
        ("--gres=fpga:1", "expected one gpu"),
        ("--gres=gpu:1 -G2", "contradict each other"),
        ("-p v100", "no GPU type of the cell; expected one of all, A100-SXM4-80GB, H100_80GB_HBM3"),
        ("-p h100 -G a100:1", "has no GPUs of type 'a100'"),
        ("--mem=lots", "--mem: 'lots'"),
        ("--mem=1 --mem-per-cpu=1", "give one of them"),
        ("--time=soon", "--time: 'soon', expected minutes"),
        ("--signal=NOSUCH", "--signal"),
        ("--output=%Q.out", "%Q is none of"),
        ("--open-mode=x", "expected append or truncate"),
        ("--dependency=singleton", "--dependency: 'singleton'"),
        ("--dependency=afterok:1?afterok:2", "all have to hold"),
        ("--array=0-3%x", "--array"),
        ("--input=in.txt", "--input is not supported"),
    ],
)
def test_what_aryl_cannot_do_is_refused_by_name(options: str, says: str) -> None:
    """Exit code 1, nothing submitted; in a script as well, with the line."""
    text = refused(cell(), *options.split())
    assert text.startswith("sbatch: error: ")
    assert says in text
    name = options.split("=")[0].split()[0].lstrip("-")
    if "not supported" in says and name != "input":
        script = f"#!/bin/sh\n#SBATCH {options}\n"
        assert "line 2 of the script" in refused(cell(), script=script)


def test_every_refused_option_says_why() -> None:
    """A user has to know what to do instead."""
    assert [option.name for option in TABLE if option.kind == Kind.REFUSED and not option.why] == []
    assert len({option.name for option in TABLE}) == len(TABLE)
    shorts = [option.short for option in TABLE if option.short]
    assert len(set(shorts)) == len(shorts)


@each_row(
    "script, says",
    [
        ("", "Batch script is empty"),
        ("echo no\n", "must start with #!"),
        ("#!/bin/sh\r\ntrue\r\n", "DOS line breaks"),
        ("#!/bin/sh\n#SBATCH --comment='open\n", "line 2 of the script"),
        ("#!/bin/sh\n#SBATCH word\n", "'word' is no option"),
        ("#!/bin/sh\n" + "x" * 20_000, "keep scripts and data in files"),
        ("#!/bin/sh\n" + "x" * 20_000, "--export=NAME,... exports fewer variables"),
    ],
)
def test_a_text_that_is_no_batch_script_is_refused(script: str, says: str) -> None:
    """As Slurm refuses it; and one that is too large for a message."""
    assert says in refused(cell(), script=script)


def test_a_script_that_does_not_exist_is_named() -> None:
    """Slurm's own sentence."""
    assert "Unable to open file /no/such" in refused(cell(), "/no/such")


def test_parsable_quiet_test_only_and_wait() -> None:
    """What scripts read."""
    assert slurm(cell(), "sbatch", "--parsable", "--wrap=true").out == "17\n"
    assert slurm(cell(), "sbatch", "-Q", "--wrap=true").out == ""
    of = cell()
    of.answers[Plan] = Planned(kind=PlanKind.JOB)
    assert slurm(of, "sbatch", "--test-only", "--wrap=true").code == 0
    assert [each.__struct_config__.tag for each in of.asked] == ["plan"]
    ended = row(state=JobState.FAILED, exit_code=7)
    assert slurm(cell(ended), "sbatch", "--wait", "--wrap=false").code == 7


def test_help_and_version_need_no_cell() -> None:
    """And no version claims to be Slurm's."""
    for command in ("sbatch", "squeue", "sinfo", "scancel", "scontrol", "sacct", "srun"):
        of = cell()
        assert slurm(of, command, "--help").out.startswith(f"usage: {command}")
        assert slurm(of, command, "--version").out.startswith("aryl ")
        assert of.asked == []


def test_the_commands_load_no_package_of_the_terminal() -> None:
    """They are called in loops, and each import counts; a GPU node has none of these packages."""
    program = (
        "import sys, coordinator.cli.slurm.main as main\n"
        "import importlib\n"
        "for name in main.COMMANDS: importlib.import_module('coordinator.cli.slurm.' + name)\n"
        "print(sorted({'typer', 'rich', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_a_list_that_names_an_unknown_node_is_noted() -> None:
    """The job is submitted: a node that is new has not reported yet."""
    found = slurm(cell(), "sbatch", "-x", "nosuch[1-2],t0", "-w", "t1,other", types="#!/bin/sh\n")
    assert (found.code, found.out) == (0, "Submitted batch job 17\n")
    assert "note: --exclude: the cell has no node nosuch[1-2]\n" in found.err
    assert "note: --nodelist: the cell has no node other\n" in found.err


ALTERNATIVES = st.lists(
    st.sampled_from(["nvlink", "rack=r7", "a/b-1"]), min_size=1, max_size=3
).map("|".join)


@given(require=st.lists(ALTERNATIVES, min_size=1, max_size=3))
def test_features_read_back_as_the_terms_that_they_show(require: list[str]) -> None:
    """`scontrol show job` can be copied into `sbatch -C`."""
    assert terms(features(require)) == require
