"""What the benchmarks compute from their measurements."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_call, fits, fused
from benchmarks.full_size import row as step_memory_row
from benchmarks.results import Row
from benchmarks.runtime import CONTENDERS, MOST, largest, main, measure
from benchmarks.streamed import main as streamed
from benchmarks.zoo import OUTSIDE, ZOO

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 31, 100, 1000, 10**6])
def test_the_largest_batch_is_found_to_three_percent(limit: int) -> None:
    found = largest(lambda count: count <= limit)
    assert found <= limit
    assert found >= min(limit, MOST) * 31 / 32 - 1


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so of any profile
def test_rows_have_ratios() -> None:
    eager, planned, outside = measure("mlp", "nano", ["eager", "memplan", "memplan-outside"], rounds=2, device="cpu")
    assert eager["speedup"] == 1
    assert isinstance(planned["speedup"], float)
    assert isinstance(outside["planned_mb"], float)


def test_the_gpu_suite_runs_its_tests_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is available: the suite itself is the test")
    root = Path(__file__).parent.parent
    script = (root / "scripts" / "gpu_suite.sh").read_text()
    subprocess.run(["bash", "-n", str(root / "scripts" / "gpu_suite.sh")], check=True)
    names = {name for line in script.splitlines() if "eager" in line for name in CONTENDERS if name in line}
    assert {"eager", "inductor-graph", "memplan-graph", "memplan-step-graph"} <= names


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


def test_fused_kernels_are_compared_and_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, measured = fused._ready(fused.CONTENDERS["memplan"], "mlp", "nano", None)
    assert step.plan is not None
    assert measured.peak >= step.plan.arena_size + step.plan.outside["parameters"] > step.plan.arena_size > 0
    assert fused.bits(measured.numbers, measured.numbers, "eager") == "eager's"
    other = (measured.numbers[0] + 1, *measured.numbers[1:])
    assert fused.bits(other, measured.numbers, "eager") == "1.0e+00 off eager's"
    asked: list[str] = []

    def rows_of(
        model: str, size: str, rounds: int, *, starts: int, whole: bool, warm: bool, chosen: list[str] | None
    ) -> list[Row]:
        assert (chosen, warm, starts) == (["inductor"], True, 2)
        asked.append(model)
        return [{**dict.fromkeys(fused.COLUMNS), "model": model}]

    monkeypatch.setattr(fused, "rows_of", rows_of)
    arguments = ["--models", "mlp,vit", "--keep", str(tmp_path / "kept"), "--directory", str(tmp_path)]
    arguments += ["--contenders", "inductor", "--warm", "--starts", "2"]
    assert [fused.main(arguments), fused.main(arguments)] == [0, 0]
    assert asked == ["mlp", "vit"]


def test_contenders_are_measured_without_those_that_they_are_compared_with() -> None:
    eager, planned = fused.rows_of("mlp", "nano", 1, chosen=["eager", "memplan"])
    assert eager["bits"] == planned["bits"] == "eager's"
    assert eager["peak_ratio"] is planned["speed"] is None
    (alone,) = fused.rows_of("mlp", "nano", 1, warm=True, chosen=["memplan"])
    assert alone["bits"] is None
    assert alone["peak_mb"] == planned["peak_mb"]


def test_a_contender_whose_process_ends_in_its_turn_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    started = fused._started

    def dying(name: str, *args: Any, **kwargs: Any) -> Any:
        one = started(name, *args, **kwargs)
        if name == "memplan":
            assert isinstance(one, fused.Running)
            one.process.kill()
            one.process.join()
        return one

    monkeypatch.setattr(fused, "_started", dying)
    eager, planned = fused.rows_of("mlp", "nano", 2, warm=True, chosen=["eager", "memplan"])
    assert planned["failed"] == fused.ENDED
    assert eager["failed"] is None
    assert eager["ms"] is not None


@pytest.mark.parametrize("name", OUTSIDE)
def test_models_outside_the_zoo_are_the_same_each_time(name: str) -> None:
    (one, inputs), (two, _) = OUTSIDE[name](), OUTSIDE[name]()
    assert torch.equal(one.eval()(*inputs), two.eval()(*inputs))


def test_first_steps_are_compared_in_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(8.0, 16.0), (2.0, 2.0), (10.0, 12.0), (3.0, 5.0)])
    monkeypatch.setattr(first_call, "_measured", lambda *_: next(seconds))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unchanged after the test")
    rows = first_call.rows_of("mlp", "nano")
    assert [(row["contender"], row["process"], row["wall_ratio"], row["cpu_ratio"]) for row in rows] == [
        ("inductor", "first", 1, 1),
        ("inductor", "second", 1, 1),
        ("memplan-inductor", "first", 1.25, 0.75),
        ("memplan-inductor", "second", 1.5, 2.5),
    ]


def test_whole_steps_of_one_kind_of_kernels_have_the_same_numbers() -> None:
    found = [
        fused._ready(fused.WHOLE[name], "mlp", "nano", None)[1] for name in ("eager + fused AdamW", "memplan's step")
    ]
    assert fused.bits(found[1].numbers, found[0].numbers, "eager") == "eager's"
    assert found[1].peak < found[0].peak


def test_what_fits_predicts_is_what_training_takes() -> None:
    found = fits.measured_apart("mlp", "nano", "memplan")
    # `compile` may make an idle arena smaller for less than the 5 % from which `fits` counts on it
    assert 0 <= found["predicted"] - found["measured"] <= 0.05 * found["measured"]


def test_a_contender_that_starts_again_has_all_its_times_and_its_highest_peak() -> None:
    first, second = (
        fused.Finished(
            measured=fused.Measured(first=seconds, peak=peak, numbers=(peak,)), budget=9, seconds=(seconds, seconds)
        )
        for seconds, peak in ((1.0, 5), (2.0, 7))
    )
    both = second.after(first)
    assert first.after(None) is first
    assert both.seconds == (1.0, 1.0, 2.0, 2.0)
    assert (both.measured.first, both.measured.peak, both.measured.numbers) == (1.0, 7, (5,))


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
