"""Expressions: exact, and nothing but numbers, symbols and arithmetic gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import InvalidPlan
from memplan.symbolic import Expression
from memplan.symbolic.sizes import evaluator, holder


@given(a=st.integers(1, 10**6), b=st.integers(1, 10**6))
def test_numbers_are_exact(a: int, b: int) -> None:
    texts = ["4*a*b*(b - 1)//2", "max(1, a - 1)", "a**3 % b", "-(a + 1)//2", "a < b and not a == 1", "min(a, b, 7)"]
    expected = (4 * a * b * (b - 1) // 2, max(1, a - 1), a**3 % b, -(a + 1) // 2, a < b and a != 1, min(a, b, 7))
    assert evaluator(texts, ["a", "b"])(a, b) == expected
    assert [Expression(t, ["a", "b"]).evaluate(a, b) for t in texts] == list(expected)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "a.real", "a[0]", "lambda: 1", "1.5*a", "'a'", "True", "c", "a if b else 1", "a**b",
        "a/b", "max(a)", "max(a, key=b)", "abs(a)", "[a]", "a and b", "1 + (a < b)", "a <", "", "a := 1",
        "a is b", "~a", "9" * 3000, str(2**70), "f'{a}'", "a @ b", "a << 70", "a**99", "max(*[1, 2])",
        "(a**8)**8", "-" * 1500 + "a",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan):
        Expression(text, ["a", "b"])


def test_a_divisor_of_zero_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidPlan, match="cannot be computed for a=2"):
        Expression("8//(a - 2)", ["a"]).evaluate(2)


def test_what_is_nested_too_deeply_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidPlan, match="too deeply"):
        Expression("+".join(["a"] * 990), ["a"]).evaluate(2)


def test_a_condition_that_cannot_be_computed_does_not_hold() -> None:
    held = holder(["a > 0", "a % (a - 2) == 0", "a < 9"], ["a"])
    assert held(2) == (1, 0, 1)
    assert held(3) == (1, 1, 1)
