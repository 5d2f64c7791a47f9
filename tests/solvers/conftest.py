"""Settings of all tests of the solvers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _wrapping_integers() -> Iterator[None]:
    """Let 64-bit integers wrap without a warning: with NUMBA_DISABLE_JIT, kernels run as plain Python."""
    with np.errstate(over="ignore"):
        yield
