from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.jsonio import clip, from_json, show, to_json
from memplan.errors import InvalidPlan, InvalidProblem


class Colour(enum.Enum):
    RED = "the colour red"
    BLUE = "the colour blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InvalidProblem("negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    share: float
    flag: bool
    pair: tuple[int, str]
    items: tuple[Inner, ...]
    table: Mapping[str, int]
    maybe: int | None = None
    seconds: float = field(default=0.0, compare=False)


inners = st.builds(Inner, size=st.integers(0, 2**40), colour=st.sampled_from(Colour))
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
outers = st.builds(
    Outer,
    name=text,
    share=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    pair=st.tuples(st.integers(-(2**40), 2**40), text),
    items=st.lists(inners, max_size=3).map(tuple),
    table=st.dictionaries(text, st.integers(0, 9), max_size=3),
    maybe=st.none() | st.integers(0, 9),
)
GOOD: dict[str, object] = {
    "name": "n",
    "share": 0.5,
    "flag": True,
    "pair": [1, "x"],
    "items": [{"size": 1}],
    "table": {"k": 1},
}


@given(outers)
def test_what_is_written_is_read_back_equal(value: Outer) -> None:
    text_ = json.dumps(to_json(value), allow_nan=False)
    assert from_json(Outer, json.loads(text_), "outer") == value


def test_defaults_and_what_is_no_part_of_the_value_stay_out() -> None:
    value = Outer(name="n", share=1.0, flag=False, pair=(1, "x"), items=(Inner(size=1),), table={}, seconds=3.0)
    assert to_json(value) == {
        "name": "n",
        "share": 1.0,
        "flag": False,
        "pair": [1, "x"],
        "items": [{"size": 1}],
        "table": {},
    }


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"name": 1}, "outer.name"),
        ({"name": None}, "outer.name"),
        ({"name": "\ud800"}, "outer.name"),
        ({"share": "x"}, "outer.share"),
        ({"share": float("inf")}, "outer.share"),
        ({"share": 10**400}, "outer.share"),
        ({"flag": 1}, "outer.flag"),
        ({"pair": [1]}, "outer.pair"),
        ({"pair": [1, 2]}, "outer.pair[1]"),
        ({"pair": [True, "x"]}, "outer.pair[0]"),
        ({"pair": [2**63, "x"]}, "outer.pair[0]"),
        ({"pair": [-(10**5000), "x"]}, "outer.pair[0]"),
        ({"pair": {}}, "outer.pair"),
        ({"items": [{"size": -1}]}, "outer.items[0]"),
        ({"items": [{"size": 1, "colour": "green"}]}, "outer.items[0].colour"),
        ({"items": [{"size": 1, "colour": ["red"]}]}, "outer.items[0].colour"),
        ({"items": [{}]}, "outer.items[0].size"),
        ({"items": [{"size": 1, "x": 1}]}, "outer.items[0].x"),
        ({"table": [1]}, "outer.table"),
        ({"table": {"k": 1.5}}, "outer.table.k"),
        ({"table": {"\ud800": 1}}, "outer.table"),
        ({"maybe": "x"}, "outer.maybe"),
        ({"more": 1}, "outer.more"),
        ({"seconds": 1.0}, "outer.seconds"),
    ],
)
def test_the_path_of_the_first_fault_is_named(change: dict[str, object], where: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        from_json(Outer, GOOD | change, "outer")
    assert caught.value.where == where
    str(caught.value).encode()


def test_messages_stay_short_whatever_the_data() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for data in (deep, list(range(10**6)), {str(i): i for i in range(10**5)}, "x" * 10**6, 10**6000, "\x1b\n"):
        assert len(show(data)) <= 60
        assert show(data).isprintable()
    assert len(clip("x" * 100)) == 60
    while deep:  # taken apart by hand: freeing it in one go recurses
        deep = deep[0]  # type: ignore[assignment]


def test_numbers_are_read_up_to_sixty_three_bits() -> None:
    for number in (2**63 - 1, -(2**63 - 1)):
        assert from_json(int, number, "n") == number
        assert show(number) == str(number)
    for number in (2**63, -(2**63)):
        with pytest.raises(InvalidPlan, match=rf"^n: a number beyond {2**63 - 1}"):
            from_json(int, number, "n")
        assert show(number) == "a very large number"
    assert from_json(float, 3, "x") == 3.0
    assert type(from_json(float, 3, "x")) is float
    with pytest.raises(InvalidPlan, match="x: nan is not a finite number"):
        from_json(float, float("nan"), "x")
    assert show(float(2**70)) == "1.1805916207174113e+21"
    assert show(True) == "True"


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (int, True, r"^n: True is not of type whole number"),
        (int, 1.0, r"^n: 1.0 is not of type whole number"),
        (bool, 1, r"^n: 1 is not of type true or false"),
        (float, True, r"^n: True is not of type number"),
        (str, 5, r"^n: 5 is not of type string"),
        (tuple[int, ...], {"a": 1}, r"^n: an object of 1 keys is not of type list"),
        (Mapping[str, int], [1, 2], r"^n: a list of 2 items is not of type object"),
        (tuple[int, str], [1, "a", 2], r"^n: 3 items, expected 2"),
        (Colour, "green", r"^n: 'green' is none of red, blue"),
        (Inner, {"size": 1, "x": 2}, r"^n\.x: unknown key"),
        (Outer, {key: value for key, value in GOOD.items() if key != "pair"}, r"^n\.pair: missing"),
        *((Outer, data, "^n: ") for data in (None, 1, "x", list[int](), True)),
        (str, "\ud800", r"^n: '\\ud800' is not Unicode text"),
    ],
)
def test_faults_say_what_was_found_and_what_is_expected(kind: Any, data: object, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        from_json(kind, data, "n")


def test_values_are_written_as_plain_json() -> None:
    assert to_json([Colour.BLUE, (1, 2), {5: Inner(size=3, colour=Colour.BLUE)}]) == [
        "blue", [1, 2], {"5": {"size": 3, "colour": "blue"}},
    ]  # fmt: skip
    assert to_json(Inner) is Inner  # a class is no value of it


def test_texts_are_shortened_at_sixty_characters() -> None:
    assert clip("x" * 60) == "x" * 60
    assert clip("x" * 61) == "x" * 57 + "..."
    assert show("y" * 58) == "'" + "y" * 58 + "'"
    assert show("y" * 59) == "'" + "y" * 56 + "..."
    assert (show({}), show({"a": 1}), show([]), show([1, 2])) == (
        "an object of 0 keys", "an object of 1 keys", "a list of 0 items", "a list of 2 items",
    )  # fmt: skip
