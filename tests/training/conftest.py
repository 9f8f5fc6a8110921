"""What every test of real training needs: the Python that has torch, and a cell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.live import LiveCell


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of an environment that has what the examples import: `make test-training`."""
    return Path(os.environ["ARYL_TRAINING_PYTHON"])


@pytest.fixture(scope="module")
def cell(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCell]:
    """Two training nodes, and two of a service that can lend one of them."""
    with LiveCell(tmp_path_factory.mktemp("cell"), python).up("2+2") as cell:
        yield cell
