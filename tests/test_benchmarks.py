"""Tests what the benchmarks compute from their measurements, and the tables that they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fits
from benchmarks.full_size import row as step_memory_row
from benchmarks.runtime import main
from benchmarks.zoo import ZOO

pytestmark = pytest.mark.slow


def test_the_command_line_writes_a_table_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--rounds", "2", "--threads", "1", "--directory", str(tmp_path), "--keep", str(tmp_path / "lines")]
    assert main(["--models", "mlp", *options]) == 0
    table = (tmp_path / "runtime.md").read_text()
    assert table.startswith("# Runtime")
    monkeypatch.setattr("benchmarks.runtime.measure", None)  # another measurement would fail
    assert main(["--models", "mlp", *options]) == 0
    assert (tmp_path / "runtime.md").read_text() == table
    with pytest.raises(SystemExit, match="made by other sources"):
        main(["--models", "mlp", *options, "--rounds", "3"])


def test_a_whole_step_is_compared_with_eagers_peak() -> None:
    found = step_memory_row("mlp", ZOO["mlp"]("nano"))
    bound, live, peak = (float(str(found[key])) for key in ("bound_ratio", "max_live_ratio", "ratio"))
    assert 0 < bound <= live <= peak < 1
    assert found["ratio"] == pytest.approx(float(str(found["peak_mb"])) / float(str(found["eager_mb"])))


def test_what_fits_predicts_is_what_training_takes() -> None:
    found = fits.measured_apart("mlp", "nano", "memplan")
    # `compile` may make an idle arena smaller for less than the 5 % from which `fits` counts on it
    assert 0 <= found["predicted"] - found["measured"] <= 0.05 * found["measured"]
