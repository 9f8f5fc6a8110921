"""The generator's parameters: each has a range, they fit each other, and all others are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect, structs

from common.errors import ConfigError
from common.model import Pool
from coordinator.sim.inputs.sweep import converted
from coordinator.workloads.named import to_jobs
from coordinator.workloads.paper import GPUS_PER_NODE, NODES, PaperParameters, check, draw, nodes
from tests.tables import each_row

FITTED = PaperParameters()


def changed(**texts: str) -> PaperParameters:
    """The fitted ones with some as a person writes them."""
    return converted("workload", PaperParameters, list(texts.items()), FITTED)


@each_row(
    ("name", "text", "range_"),
    [
        ("load", "0", "> 0.0"),
        ("rate_sigma", "1000", "<= 10.0"),
        ("long_sigma", "1e9", "<= 10.0"),
        ("rate_tau_h", "0", ">= 0.01"),
        ("batch", "0.5", ">= 1.0"),
        ("initial", "-1", ">= 0.0"),
        ("initial", "5", "<= 2.0"),
        ("short_share", "0", "> 0.0"),
        ("short_share", "1.5", "< 0.95"),
        ("short_s", "1", ">= 20.0"),
        ("long_s", "0", ">= 20.0"),
        ("q95_s", "1e300", "<= 100000000.0"),
        ("short_tilt", "11", "<= 10.0"),
        ("gangs", "-1", ">= 0"),
        ("gang_gpus", "0", ">= 1.0"),
        ("gang_gpus", "-5", ">= 1.0"),
        ("gang_s", "-100", ">= 0.0"),
        ("rare_jobs", "60000", "<= 50390"),
        ("rare_nodes", "-1", ">= 0"),
        ("rare_nodes", "443", "<= 442"),
        ("rare_load", "-1", ">= 0.0"),
        ("pass_period_s", "100000000", "<= 86400"),
    ],
)
def test_a_parameter_out_of_its_range_is_refused_by_name(name: str, text: str, range_: str) -> None:
    """With its value and the limit, before a trace is drawn of it."""
    with pytest.raises(ConfigError, match=f"^workload.{name}: '{text}': Expected .* {range_}$"):
        changed(**{name: text})


def test_every_number_has_both_ends_and_the_fitted_one_lies_between() -> None:
    """One that is added without a range would be found by whoever sweeps it."""
    for field in structs.fields(PaperParameters):
        kind = inspect.type_info(field.type)
        if isinstance(kind, inspect.BoolType):
            continue
        assert isinstance(kind, inspect.IntType | inspect.FloatType), field.name
        assert kind.ge is not None or kind.gt is not None, field.name
        assert kind.le is not None or kind.lt is not None, field.name
        changed(**{field.name: str(getattr(FITTED, field.name))})


@each_row(
    ("texts", "said"),
    [
        ({"long_s": "90000"}, "long_s: 90000, expected at most q95_s, which is 82000"),
        ({"short_s": "30000"}, "short_s: 30000, expected at most long_s, which is 20600"),
        ({"rare_nodes": "0"}, "rare_nodes: 0, expected one or more for 504 rare_jobs"),
        ({"gangs": "47800"}, "rare_jobs and gangs: 48304 jobs, expected at most 47869 together"),
    ],
)
def test_parameters_that_do_not_fit_each_other_are_refused(
    texts: dict[str, str], said: str
) -> None:
    """By the names of both; none of them alone is out of its range."""
    found = changed(**texts)
    with pytest.raises(ValueError, match=f"^{said}$"):
        check(found)
    with pytest.raises(ValueError, match=f"^{said}$"):
        draw(found, 1, jobs=1000)


@pytest.mark.parametrize("rare_nodes", [0, 3])
def test_a_cluster_without_the_rare_type_can_be_drawn(rare_nodes: int) -> None:
    """No job asks for it, the load is the same, and without a node of it there is no such group."""
    found = changed(rare_jobs="0", rare_nodes=str(rare_nodes))
    drawn = draw(found, 1, jobs=5000)
    assert not drawn.is_rare.any()
    offered = float((drawn.duration_s * drawn.gpus).sum())
    fitted = draw(FITTED, 1, jobs=5000)
    assert offered == pytest.approx(float((fitted.duration_s * fitted.gpus).sum()), rel=0.01)
    groups = nodes(found)
    assert all(group.count > 0 for group in groups)
    training = [group.count for group in groups if group.home_pool == Pool.TRAINING]
    assert training == ([NODES] if not rare_nodes else [NODES - 3, 3])
    assert len(to_jobs(drawn, found)) == 5000


UNIT = st.floats(0.0, 1.0)


@given(st.lists(UNIT, min_size=len(structs.fields(PaperParameters)), max_size=40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_within_all_ranges_makes_a_trace_or_one_clear_error(
    parts: list[float], is_near: bool
) -> None:
    """Never a warning of the arithmetic, nor a job that cannot be: near the fit, or anywhere."""
    values: dict[str, object] = {}
    for part, field in zip(parts, structs.fields(PaperParameters), strict=False):
        kind = inspect.type_info(field.type)
        if not isinstance(kind, inspect.IntType | inspect.FloatType):
            continue
        low = float(kind.ge if kind.ge is not None else kind.gt or 0) or 1e-6
        high = float(kind.le if kind.le is not None else (kind.lt or 1) - 1e-6)
        at = low + part * (high - low)
        if is_near:
            at = min(high, max(low, float(getattr(FITTED, field.name)) * (0.5 + part)))
        values[field.name] = int(at) if isinstance(kind, inspect.IntType) else at
    try:
        drawn = draw(structs.replace(FITTED, **values), 1, jobs=400)
    except ValueError as error:
        assert str(error)
        return
    assert np.isfinite(drawn.submit_s).all()
    assert np.isfinite(drawn.duration_s).all()
    assert (drawn.duration_s >= 1).all()
    assert (drawn.submit_s >= 0).all()
    assert (drawn.gpus >= 1).all()
    assert (drawn.size <= GPUS_PER_NODE).all()
