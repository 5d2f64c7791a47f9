"""Before torch is imported: one thread, so that every kernel adds in the same order each time.

Some CPU kernels (`index_put` that accumulates) do not with several, and tests compare bits.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.kernel_cache import keep_kernels

os.environ.setdefault("OMP_NUM_THREADS", "1")
keep_kernels()

# Tracing makes millions of objects that live on: looking through all of them less often saves a tenth of the time.
gc.set_threshold(100_000, 20, 100)

# No test depends on how busy its machine is. Examples differ from run to run: a property that names no number of its
# own sees in three runs as many as Hypothesis shows in one.
settings.register_profile("memplan", deadline=None, max_examples=35)
settings.load_profile("memplan")


# Where a case traces, plans and runs a model, each combination of parameters is too many for the fast tests.
_ROOMS = ("analysis", "behaviours", "device", "distributed", "evict", "integrations", "parity", "runtime", "trace")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.slow import mark_repetitions

    here = Path(__file__).parent
    mark_repetitions(item for item in items if item.path.relative_to(here).parts[0] in _ROOMS)


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_modules_left_is_frozen() -> None:
    """Take what is there before a module's tests out of the collector's sight: it grows to millions of objects."""
    gc.collect()
    gc.freeze()
