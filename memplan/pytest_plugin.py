"""A pytest plugin that fails a test whose model needs more memory than its marker allows.

    @pytest.mark.memplan(arena="12 MiB", fragmentation=0.05)
    def test_memory(memplan):
        memplan.check(Model(), (torch.zeros(8, 128),))

The limits of the marker and of `check` both apply; a limit of `check` replaces the marker's of the same name. Nothing
is computed: the model is planned from fake tensors. torch is imported by the first check only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from memplan.errors import InvalidSize, LimitExceeded

if TYPE_CHECKING:
    from memplan.check.check import Rule, Verdict
    from memplan.core.plan import Plan

Limit = int | float | str

_MARKER = (
    "memplan(*rules, arena=None, fragmentation=None, outside=None): what a model may need, in bytes ('12 MiB') or as "
    "a share (0.05); rules are written like 'peak:3MiB'. Use it with the fixture `memplan`."
)
_NAMES = ("arena", "fragmentation", "outside")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test with the marker but without the fixture, since nothing would check its limits."""
    names: Iterable[str] = getattr(item, "fixturenames", ())
    if item.get_closest_marker("memplan") and "memplan" not in names:
        pytest.fail(
            "@pytest.mark.memplan needs the fixture `memplan`: call memplan.check(model, inputs)", pytrace=False
        )


@pytest.fixture
def memplan(request: pytest.FixtureRequest) -> Iterator[Checker]:
    """Provide a `Checker` with the limits of `@pytest.mark.memplan`."""
    marker = request.node.get_closest_marker("memplan")
    checker = Checker(marker.args if marker else (), marker.kwargs if marker else {})
    yield checker
    if marker and not checker.plans:
        pytest.fail("@pytest.mark.memplan checked nothing: call memplan.check(model, inputs)", pytrace=False)


class Checker:
    """The value of the fixture `memplan`. `plans` are the plans of all checks of this test so far."""

    def __init__(self, rules: Iterable[str] = (), limits: Mapping[str, Limit | None] | None = None) -> None:
        self._rules, self._limits = tuple(rules), dict(limits or {})
        self.plans: list[Plan] = []

    def check(
        self,
        model: Any,
        inputs: Any = (),
        kwargs: dict[str, Any] | None = None,
        *,
        arena: Limit | None = None,
        fragmentation: Limit | None = None,
        outside: Limit | None = None,
        train: bool | None = None,
    ) -> Plan:
        """Plan one step of `model`, check it against the limits, and return the plan.

        Args:
            model: The module, or a `Plan` to check.
            inputs: A tuple of positional arguments, a dict of keywords (without `kwargs`), or the only argument.
            kwargs: The keyword arguments.
            arena: The most bytes of the arena: a number or a text ("12 MiB").
            fragmentation: The largest share of the arena that may be lost at the peak, between 0 and 1.
            outside: The most bytes outside the arena.
            train: Plan forward and backward (True) or the forward alone (False); None follows `model.training`.

        Returns:
            The plan.

        Raises:
            LimitExceeded: A limit is exceeded; the error says by how much and lists the largest buffers.
            InvalidSize: A limit has no valid value, or there is no limit at all.
            UnsupportedGraph: The model cannot be planned, as in `memplan.plan`.
            TorchNotInstalled: torch is not installed, and `model` is not a `Plan`.
        """
        __tracebackhide__ = True
        from memplan.check.check import check
        from memplan.core.plan import Plan

        own = {"arena": arena, "fragmentation": fragmentation, "outside": outside}
        rules = _rules(self._rules, {**self._limits, **{k: v for k, v in own.items() if v is not None}})
        if isinstance(model, Plan):
            plan = model
        else:
            from memplan.core.arguments import require_torch

            require_torch("memplan.check of a model")
            from memplan import trace

            with _without_torchs_trace():
                plan = trace.plan(model, inputs, kwargs, train=train)
        self.plans.append(plan)
        verdict = check(plan, rules)
        if not verdict.ok:
            raise LimitExceeded(_message(verdict), hint="memplan explain shows who is alive at the peak, and why")
        return plan


@contextlib.contextmanager
def _without_torchs_trace() -> Iterator[None]:
    """Keep what torch logs for its own trace files out of what pytest prints below a failure.

    pytest adds handlers of its own to that logger, since it does not propagate.
    """
    log = logging.getLogger("torch.__trace")
    others = [handler for handler in log.handlers if not type(handler).__module__.startswith("torch.")]
    for handler in others:
        log.removeHandler(handler)
    try:
        yield
    finally:
        for handler in others:
            log.addHandler(handler)


def _rules(texts: Iterable[str], limits: Mapping[str, Limit | None]) -> tuple[Rule, ...]:
    from memplan.check.check import parse_rule

    unknown = [name for name in limits if name not in _NAMES]
    if unknown:
        raise InvalidSize(f"there is no limit {unknown[0]!r}", where="memplan", hint=f"known are {', '.join(_NAMES)}")
    written = [*texts, *(f"{name}:{_text(value)}" for name, value in limits.items() if value is not None)]
    rules = tuple(map(parse_rule, written))
    for rule in rules:
        if rule.needs_baseline:
            raise InvalidSize(
                f"{rule.text!r} is relative to a baseline", where="memplan", hint="use memplan check --baseline in CI"
            )
    if not rules:
        raise InvalidSize(
            "no limit is given", where="memplan", hint='write memplan.check(model, inputs, arena="12 MiB")'
        )
    return rules


def _text(limit: Limit) -> str:
    """Return a limit as text; a float is never written in the form 1e-05."""
    if isinstance(limit, float):
        return f"{limit:.19f}".rstrip("0").rstrip(".")
    return f"{limit}B" if isinstance(limit, int) and limit else str(limit)  # a number of code is one of bytes


def _message(verdict: Verdict) -> str:
    from memplan.report.terminal import text
    from memplan.report.verdicts import Judged, check_form

    return text(check_form([Judged(name=verdict.model or "the model", verdict=verdict)]))
