"""What the benchmarks compute from their measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import first_call, fits, fused
from benchmarks.full_size import row as step_memory_row
from benchmarks.runtime import MOST, largest, main
from benchmarks.streamed import main as streamed
from benchmarks.zoo import ZOO

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 31, 100, 1000, 10**6])
def test_the_largest_batch_is_found_to_three_percent(limit: int) -> None:
    found = largest(lambda count: count <= limit)
    assert found <= limit
    assert found >= min(limit, MOST) * 31 / 32 - 1


def test_the_command_line_writes_a_table_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--rounds", "2", "--threads", "1", "--directory", str(tmp_path), "--keep", str(tmp_path / "lines")]
    assert main(["--models", "mlp", *options]) == 0
    assert set(ZOO) >= {"mlp"}
    table = (tmp_path / "runtime.md").read_text()
    assert table.startswith("# Runtime")
    monkeypatch.setattr("benchmarks.runtime.measure", None)  # another measurement would fail
    assert main(["--models", "mlp", *options]) == 0
    assert (tmp_path / "runtime.md").read_text() == table
    with pytest.raises(SystemExit, match="made by other sources"):
        main(["--models", "mlp", *options, "--rounds", "3"])


def test_streamed_models_are_measured_at_every_budget(tmp_path: Path) -> None:
    options = ["--models", "mlp", "--size", "nano", "--policies", "genoa,flow", "--rounds", "2"]
    assert streamed([*options, "--directory", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "streamed.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["alone", "flow", "flow", "flow", "genoa", "flow"]
    slowest = next(row for row in rows if row["policy"] == "genoa")
    assert all(row["predicted_ms"] <= slowest["predicted_ms"] for row in rows if row["policy"] == "flow")
    assert all(row["arena"] >= slowest["arena"] for row in rows if row["policy"] == "flow")


def test_a_whole_step_is_compared_with_eagers_peak() -> None:
    found = step_memory_row("mlp", ZOO["mlp"]("nano"))
    bound, live, peak = (float(str(found[key])) for key in ("bound_ratio", "max_live_ratio", "ratio"))
    assert 0 < bound <= live <= peak < 1
    assert found["ratio"] == pytest.approx(float(str(found["peak_mb"])) / float(str(found["eager_mb"])))


def test_first_steps_are_timed_in_processes_of_their_own(tmp_path: Path) -> None:
    arguments = ["--models", "mlp", "--repeats", "1", "--contenders", "memplan", "--directory", str(tmp_path)]
    assert first_call.main(arguments) == 0
    (row,) = json.loads((tmp_path / "first-call.json").read_text())["rows"]
    assert row["memplan"] == 1
    assert row["memplan_s"] > 0


def test_what_fits_predicts_is_what_training_takes() -> None:
    found = fits.measured_apart("mlp", "nano", "memplan")
    # `compile` may make an idle arena smaller for less than the 5 % from which `fits` counts on it
    assert 0 <= found["predicted"] - found["measured"] <= 0.05 * found["measured"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--starts", "0"], "at least 1"),
        (["--contenders", "memplan's step"], "only with --whole"),
        (["--whole", "--contenders", "inductor-knob"], "not of whole steps"),
    ],
)
def test_the_benchmark_of_fused_kernels_refuses_what_it_cannot_measure(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fused.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
