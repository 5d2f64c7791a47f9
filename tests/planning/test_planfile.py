"""Plan files: equal after a round trip, byte-identical everywhere, and never believed without proof."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from memplan.check.check import check, parse_rule
from memplan.core.plan import SCHEMA_VERSION, Plan
from memplan.errors import InvalidPlan, InvalidSolution, MemplanError, UnreadableFile
from memplan.planning import planfile
from memplan.planning.planfile import check_consistency, require_budget
from memplan.symbolic.plan import load_symbolic
from tests.cli.helpers import python
from tests.graph_strategies import plans
from tests.samples import deep_plan, sample_plan

HEAD = ("schema_version", "fingerprint", "checksum")
Json = dict[str, Any]


def _data(plan: Plan) -> Json:
    data: Json = json.loads(planfile.to_text(plan))
    return data


def _resealed(data: Json) -> Json:
    """`data` with a checksum that fits, as someone who means harm would write it."""
    body = {key: value for key, value in data.items() if key not in HEAD}
    return {**data, "checksum": planfile.checksum(body)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


@given(plans())
def test_what_is_saved_is_loaded_equal(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        loaded = planfile.load(path)
        assert loaded == plan
        assert loaded.total == plan.total
        assert planfile.to_text(loaded) == planfile.to_text(plan)


def test_another_hash_seed_gives_the_same_bytes() -> None:
    code = (
        "from memplan.planning.planfile import to_text; from tests.samples import sample_plan; "
        "print(to_text(sample_plan()))"
    )
    assert python(code, PYTHONHASHSEED="1").stdout == planfile.to_text(sample_plan()) + "\n"


def test_layout_and_order_of_keys_do_not_matter(path: Path) -> None:
    data = _data(sample_plan())
    path.write_text(json.dumps(dict(reversed(data.items())), indent=3), encoding="utf-16")
    assert planfile.load(path) == sample_plan()


def test_a_missing_file_and_a_folder_are_unreadable(tmp_path: Path) -> None:
    missing, unread = "cannot be read: No such file or directory", "cannot be read|is not JSON"
    for path, what in ((tmp_path / "none.json", missing), (tmp_path, unread), ("bad\0name", unread)):
        with pytest.raises(UnreadableFile, match=what) as caught:
            planfile.load(path)
        assert type(caught.value) is UnreadableFile
        assert caught.value.where == str(path)


def _set(*steps: str | int, value: object) -> Callable[[Json], None]:
    def change(data: Json) -> None:
        at: Any = data
        for step in steps[:-1]:
            at = at[step]
        at[steps[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_set("solution", "offsets", "activation_2", value=64), InvalidSolution),
        (_set("solution", "offsets", "activation_2", value=-64), InvalidSolution),
        (_set("solution", "arena_size", value=10), InvalidSolution),
        (_set("solution", "status", value="unknown"), InvalidPlan),
        (_set("solution", "offsets", value={}), InvalidSolution),
        (_set("problem", "buffers", 0, "size", value=64), InvalidPlan),
        (_set("problem", "buffers", 0, "live", "end", value=1), InvalidPlan),
        (_set("problem", "capacity", value=10**9), InvalidPlan),
        (_set("schedule", "order", value=[1, 0, 2, 3, 4]), InvalidPlan),
        (_set("schedule", "max_live", value=1), InvalidPlan),
        (_set("schedule", "bound", value=1), InvalidPlan),
        (_set("schedule", "bound", value=10**6), InvalidPlan),
        (_set("graph", "storages", 2, "nbytes", value=1000), InvalidPlan),
        (_set("graph", "ops", 0, "writes", value=[77]), InvalidPlan),
        (_set("temporaries", value=[1]), InvalidPlan),
        (_set("temporaries", value=[0, 0, 0, 0, -1]), InvalidPlan),
        (_set("alignment", value=0), InvalidPlan),
        *((_set("redzone", value=value), InvalidPlan) for value in (3, -64)),
        (_set("reserve", value=-1), InvalidPlan),
    ],
)
def test_lies_under_a_mended_checksum_are_found(
    path: Path, change: Callable[[Json], None], error: type[MemplanError]
) -> None:
    data = _data(sample_plan())
    change(data)
    path.write_text(json.dumps(_resealed(data)))
    with pytest.raises(error, match=r"plan\.json"):
        planfile.load(path)


# Hostile files by the thousand.

VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 63, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**4000, 0.5, -0.0, 1e308, "", "x",
    "activation_2", "aten.mm", "optimal", "\x00", "\ud800", "é", [], {}, [[]], [0], [0] * 1000, {"": 0}, {"start": 0},
)  # fmt: skip


def _containers(data: Any) -> Iterator[Any]:
    if isinstance(data, (dict, list)) and data:
        yield data
        for item in data.values() if isinstance(data, dict) else data:
            yield from _containers(item)


def _mutate(data: Json, rng: random.Random) -> None:
    """One change somewhere in `data`: deleted, replaced, nudged, renamed, swapped, repeated or moved."""
    places = list(_containers(data))
    at = rng.choice(places)
    key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
    how = rng.randrange(7)
    if how == 0:
        del at[key]
    elif how == 1:
        at[key] = copy.deepcopy(rng.choice(VALUES))
    elif how == 2 and type(at[key]) is int:
        at[key] += rng.choice((-64, -1, 1, 64))
    elif how == 3 and isinstance(at, dict):
        at[rng.choice(("name", "id", "size", "x", "activation_3"))] = at.pop(key)
    elif how == 4 and isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(at[key]))
    elif how == 5 and isinstance(at, list):
        rng.shuffle(at)
    else:
        other = rng.choice(places)
        at[key] = copy.deepcopy(rng.choice(list(other.values()) if isinstance(other, dict) else other))


def _dump(data: Json) -> str:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(data)
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_mutated_file_is_an_error_or_a_plan_that_holds(path: Path, seed: int, sealed: bool) -> None:
    """2,000 files. With the checksum mended, what is loaded still passes everything that a plan must pass."""
    rng = random.Random(seed)
    plan = sample_plan(temporaries=(0, 100, 0, 0, 7))
    original = _data(plan)
    accepted = 0
    for _ in range(500):
        data = copy.deepcopy(original)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            _mutate(data, rng)
        path.write_text(_dump(_resealed(data) if sealed else data))
        try:
            loaded = planfile.load(path)
        except MemplanError as error:
            str(error).encode()
            continue
        accepted += 1
        if not sealed:
            assert loaded == plan
        _holds(loaded)
    assert accepted < 250


def _holds(plan: Plan) -> None:
    check_consistency(plan)
    report = plan.report()
    assert report.total == report.arena_size + report.outside_total
    assert plan.to_text()
    assert check(plan, [parse_rule(f"arena:{plan.arena_size}B")]).ok
    assert planfile.to_text(plan)


def test_a_damaged_text_is_an_error_or_the_same_plan(path: Path) -> None:
    """500 files with bytes flipped, cut out, doubled, or the end missing."""
    rng = random.Random(0)
    plan = sample_plan()
    original = planfile.to_text(plan).encode()
    for _ in range(500):
        text = bytearray(original)
        at, length = rng.randrange(len(text)), rng.choice((1, 1, 2, 10, 100))
        match rng.randrange(4):
            case 0:
                text[at] ^= 1 << rng.randrange(8)
            case 1:
                del text[at : at + length]
            case 2:
                text[at:at] = text[at : at + length]
            case _:
                del text[at:]
        path.write_bytes(text)
        try:
            assert planfile.load(path) == plan
        except MemplanError:
            continue


def test_a_long_list_is_refused_at_once(path: Path) -> None:
    data = _data(sample_plan())
    data["schedule"]["order"] = [0] * 200_000
    path.write_text(json.dumps(_resealed(data)))
    with pytest.raises(InvalidPlan, match=r"schedule\.order"):
        planfile.load(path)


_HINT = "make the plan anew: memplan.plan(model, example_inputs).save(path)"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"schema_version":NaN}', "is not JSON: NaN is not a number"),
        (b'{"schema_version":1,"x":Infinity}', "is not JSON: Infinity is not a number"),
        (
            b'{"a":1,"schema_version":1,"schema_version":1}',
            "is not JSON: key 'schema_version' stands twice in one object",
        ),
        (
            b'{"schema_version":1,"graph":{"ops":[],"x":0,"ops":[]}}',
            "is not JSON: key 'ops' stands twice in one object",
        ),
        (b"{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[" * 200_000, "is not JSON: nested too deeply"),
        (b'{"a":' * 200_000, "is not JSON: nested too deeply"),
        *((content, "is not JSON: ") for content in (b"", b"\x00\x01\x02", b"\xff\xfe\xfd", b"1" * 10_000)),
    ],
)
def test_what_is_no_json_is_unreadable_and_no_invalid_plan(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        planfile.load(path)
    error = caught.value
    assert type(error) is UnreadableFile
    assert error.what.startswith(what)
    assert (error.where, error.hint) == (str(path), _HINT)


@pytest.mark.parametrize(
    ("change", "what", "at"),
    [
        ({"schema_version": True}, "is not a plan: it has no schema_version", ""),
        ({"schema_version": "1"}, "is not a plan: it has no schema_version", ""),
        ({"schema_version": None}, "is not a plan: it has no schema_version", ""),
        ({"schema_version": SCHEMA_VERSION - 1}, f"has schema version {SCHEMA_VERSION - 1}, this memplan reads", ""),
        ({"schema_version": SCHEMA_VERSION + 1}, f"has schema version {SCHEMA_VERSION + 1}, this memplan reads", ""),
        ({"schema_version": 10**22}, "has schema version a very large number, this memplan reads", ""),
        ({"checksum": None}, "the file was changed or damaged after it was written", "plan.checksum"),
        ({"checksum": "0" * 64}, "the file was changed or damaged after it was written", "plan.checksum"),
        ({"fingerprint": None}, "does not belong to the graph of this file", "plan.fingerprint"),
        ({"alignment": "64"}, "'64' is not of type whole number", "plan.alignment"),
        ({"more": 1}, "unknown key", "plan.more"),
    ],
)
def test_a_head_that_does_not_fit_is_an_invalid_plan(path: Path, change: Json, what: str, at: str) -> None:
    data = {**_data(sample_plan()), **change}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(UnreadableFile) as caught:
        planfile.load(path)
    error = caught.value
    assert type(error) is InvalidPlan
    assert error.what.startswith(what)
    assert (error.where, error.hint) == (f"{path}: {at}" if at else str(path), _HINT)


@pytest.mark.parametrize("key", [*HEAD, "graph", "schedule", "problem", "solution", "alignment"])
def test_no_key_may_be_absent(path: Path, key: str) -> None:
    data = _data(sample_plan())
    del data[key]
    path.write_text(json.dumps(data if key in HEAD else _resealed(data)))
    with pytest.raises(UnreadableFile, match=key if key != "checksum" else "changed or damaged") as caught:
        planfile.load(path)
    assert type(caught.value) is InvalidPlan


def test_other_kinds_of_files_say_who_reads_them(path: Path) -> None:
    for content, hint in (
        ('{"symbolic_version":1}', "read it with memplan.load_symbolic"),
        *(
            (said, _HINT)
            for said in ('{"schema_version":1.5}', '{"schema_version":1e999}', "[]", "3", "null", '"x"', "{}")
        ),
    ):
        path.write_text(content)
        with pytest.raises(InvalidPlan, match="is not a plan: ") as caught:
            planfile.load(path)
        assert (caught.value.where, caught.value.hint) == (str(path), hint)
    sample_plan().save(path)
    with pytest.raises(InvalidPlan, match="is not a symbolic plan") as caught:
        load_symbolic(path)
    assert caught.value.hint == "read it with memplan.load"


def test_the_file_is_compact_and_its_checksum_is_of_sorted_compact_json() -> None:
    text = planfile.to_text(sample_plan())
    data = json.loads(text)
    assert list(data)[:3] == list(HEAD)
    assert text == json.dumps(data, separators=(",", ":")) + "\n"
    body = {key: value for key, value in data.items() if key not in HEAD}
    compact = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert data["checksum"] == hashlib.sha256(compact.encode()).hexdigest()
    assert data["fingerprint"] == sample_plan().fingerprint
    with pytest.raises(ValueError, match="Out of range float"):
        planfile.checksum({"x": float("nan")})


@pytest.mark.parametrize(
    ("name", "need"),
    [("arena_budget", "arena_size"), ("budget", "on_device"), ("host_budget", "host_size")],
)
def test_a_plan_is_refused_from_one_byte_above_each_of_its_budgets_on(name: str, need: str) -> None:
    plan = deep_plan("genoa")
    assert plan.eviction is not None
    limit = getattr(plan, need)
    assert limit > 0
    for allowed in (limit, limit + 1):
        kept = dataclasses.replace(plan.eviction, **{name: allowed})
        require_budget(dataclasses.replace(plan, eviction=kept))
    over = dataclasses.replace(plan, eviction=dataclasses.replace(plan.eviction, **{name: limit - 1}))
    with pytest.raises(InvalidPlan, match=rf"{limit} bytes is larger than its budget of {limit - 1}") as raised:
        require_budget(over)
    require_budget(dataclasses.replace(over, redzone=64))  # for tests
    assert f"eviction.{name}" in str(raised.value)
    with pytest.raises(InvalidPlan, match="larger than its budget"):
        check_consistency(over)
