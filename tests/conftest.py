"""Before torch is imported: one thread, so that every kernel adds in the same order each time.

Some CPU kernels (`index_put` that accumulates) do not with several, and tests compare bits.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.kernel_cache import keep_kernels

os.environ.setdefault("OMP_NUM_THREADS", "1")
keep_kernels()

# Tracing makes millions of objects that live on: looking through all of them less often saves a tenth of the time.
gc.set_threshold(100_000, 20, 100)

# No test depends on how busy its machine is. Examples differ from run to run: a property that names no number of its
# own sees in three fast runs as many as Hypothesis shows in one, and as one run of all tests shows.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile("fast", parent=_ANY, max_examples=35)
settings.register_profile("all", parent=_ANY, max_examples=100)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fast" if config.getoption("markexpr") == "not slow" else "all")


# Rooms whose tests trace, plan and run no models: each combination of parameters is a fast test there.
_QUICK = ("check", "cli", "core", "report", "schedule", "solvers", "symbolic")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.slow import mark_repetitions

    here = Path(__file__).parent
    mark_repetitions(item for item in items if item.path.relative_to(here).parts[0] not in _QUICK)


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_modules_left_is_frozen() -> None:
    """Take what is there before a module's tests out of the collector's sight: it grows to millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _eagers_kernels_on_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tests of a GPU that name no kernels those of eager, whose bits they compare."""
    if request.node.get_closest_marker("cuda"):
        from memplan.trace import default_kernels

        monkeypatch.setattr(default_kernels, "_is_on_accelerator", lambda *_: False)
