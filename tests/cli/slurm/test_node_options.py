"""`--constraint` of Slurm's commands and the terms of a job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli.slurm.node_options import features, terms

ALTERNATIVES = st.lists(
    st.sampled_from(["nvlink", "rack=r7", "a/b-1"]), min_size=1, max_size=3
).map("|".join)


@given(require=st.lists(ALTERNATIVES, min_size=1, max_size=3))
def test_features_read_back_as_the_terms_that_they_show(require: list[str]) -> None:
    """`scontrol show job` can be copied into `sbatch -C`."""
    assert terms(features(require)) == require
