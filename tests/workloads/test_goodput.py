"""Goodput: what more GPUs, more nodes and a tuned batch size bring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.model import WorkerRange
from coordinator.workloads.goodput import FITTED, GoodputModel, model_for, speedup_of
from coordinator.workloads.records import TraceJob
from coordinator.workloads.shaping import RuntimeModel, ShapeOptions, to_workload_jobs

MODELS = st.sampled_from([FITTED[name] for name in sorted(FITTED)])

ROUND = GoodputModel(
    alpha_grad=0.0,
    beta_grad=0.01,
    alpha_local=0.5,
    beta_local=0.1,
    alpha_node=2.0,
    beta_node=0.0,
    gamma=1.0,
    base_batch=100,
    local_batch=100,
)


def test_an_iteration_is_gradient_and_synchronization() -> None:
    """One GPU: 1 s. Two on a node: half of the gradient and 0.5 s. Four: 0.25, 0.5 and 2 x 0.1."""
    assert ROUND.iteration_s(1, 1, 100) == pytest.approx(1.0)
    assert ROUND.iteration_s(2, 1, 50) == pytest.approx(1.0)
    assert ROUND.iteration_s(4, 1, 25) == pytest.approx(0.95)
    assert ROUND.iteration_s(4, 2, 25) == pytest.approx(2.25)
    assert ROUND.iteration_s(1, 1, 100, accumulations=2) == pytest.approx(3.0)


def test_a_synchronization_over_nodes_grows_from_the_third_gpu_on() -> None:
    """T_sync = alpha_node + beta_node (K - 2): with 2 s and 0.1 s a GPU two GPUs on two nodes take
    2 s, four take 2.2 s, beside gradients of 0.5 s and 0.25 s."""
    far = structs.replace(ROUND, beta_node=0.1)
    assert far.iteration_s(2, 2, 50) == pytest.approx(0.5 + 2.0)
    assert far.iteration_s(4, 2, 25) == pytest.approx(0.25 + 2.2)


def test_accumulated_gradients_synchronize_once() -> None:
    """T_iter = s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma): two GPUs with 0.5 s a gradient,
    0.5 s a synchronization and s = 2 take 2 x 0.5 + 1 = 2 s, and not three times 1 s."""
    assert ROUND.iteration_s(2, 1, 50, accumulations=2) == pytest.approx(2.0)


def test_overlap_takes_the_longer_of_both() -> None:
    """With gamma 10 a gradient of 1 s and a synchronization of 1 s take 7 % more than one."""
    overlapped = GoodputModel(
        alpha_grad=1.0, beta_grad=0.0, alpha_local=1.0, beta_local=0.0,
        alpha_node=1.0, beta_node=0.0, gamma=10.0, base_batch=1, local_batch=1,
    )  # fmt: skip
    assert overlapped.iteration_s(2, 1, 1) == pytest.approx(2**0.1)


def test_a_larger_batch_is_less_efficient() -> None:
    """The base batch is the measure; with a noise of ten of them twice the batch makes 11/12."""
    assert ROUND.efficiency(100) == 1.0
    assert ROUND.efficiency(200) == pytest.approx(11 / 12)


@given(MODELS, st.integers(1, 64))
def test_tuning_never_hurts(model: GoodputModel, gpus: int) -> None:
    """TunedIsNoWorse: the base batch is one of those that are tried."""
    nodes = -(-gpus // 8)
    tuned, fixed = model.tuned(gpus, nodes), model.fixed(gpus, nodes)
    assert tuned.per_s >= fixed.per_s
    assert tuned.batch >= model.base_batch


@given(MODELS, st.integers(2, 8))
def test_spreading_never_helps(model: GoodputModel, gpus: int) -> None:
    """The same GPUs on two nodes cost as much or more, within the 5 % that the fits are off."""
    assert model.fixed(gpus, 2).per_s <= model.fixed(gpus, 1).per_s * 1.05


def test_a_name_finds_its_model_and_a_stranger_gets_the_same_one_again() -> None:
    """`ResNet-50` is `resnet50`; what nobody fitted is drawn by the job, not by the run."""
    assert model_for("ResNet-50", "a") is FITTED["resnet50"]
    assert model_for("", "a") is model_for("", "a")
    assert len({id(model_for("", str(number))) for number in range(50)}) == len(FITTED)


def test_a_base_gang_as_submitted_is_the_measure_of_its_speed_up() -> None:
    """Two workers make two a second with a fixed batch; tuned, they may make more."""
    workers = WorkerRange(min=2, max=4)
    fixed = speedup_of(FITTED["vgg16"], workers, 4, 8, is_tuned=False)
    tuned = speedup_of(FITTED["vgg16"], workers, 4, 8, is_tuned=True)
    assert fixed.rates[0] == pytest.approx(2.0)
    assert all(high >= low for low, high in zip(fixed.rates, tuned.rates, strict=True))
    assert tuned.rates[-1] > fixed.rates[-1]


def test_an_elastic_job_takes_as_long_as_the_trace_says_at_its_own_width() -> None:
    """With the GPUs that it had a job takes what it took, and less where it tunes itself."""
    job = TraceJob(
        job_id="a", submit_s=0.0, duration_s=100.0, gpus=8, gpus_per_worker=4, min_workers=1,
        max_workers=4,
    )  # fmt: skip
    [plain] = to_workload_jobs([job], ShapeOptions(runtime=RuntimeModel.GOODPUT))
    [tuned] = to_workload_jobs([job], ShapeOptions(runtime=RuntimeModel.TUNED))
    assert plain.work_s / plain.speedup.rate(2) == pytest.approx(100.0)
    assert plain.work_s == tuned.work_s
    assert tuned.work_s / tuned.speedup.rate(2) <= 100.0
    assert plain.spec.profile.speedup != tuned.spec.profile.speedup
