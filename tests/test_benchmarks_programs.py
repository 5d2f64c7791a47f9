"""Some programs of `benchmarks.programs` run no worse than the committed table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.program_zoo import PROGRAMS
from benchmarks.programs import Result, missing, run
from tests.slow import slow

TABLE = Path(__file__).parent.parent / "benchmarks" / "results" / "programs.json"
RESULTS = list(Result)
# One of several models, which takes little time; and every night a fifth of all.
CHOSEN = ("distillation",)
OTHERS = (
    "mnist_rnn", "dcgan", "actor_critic", "vae", "regression", "ema", "transfer", "autocast", "word_lm_transformer",
    "accelerate_bf16", "bert", "siamese", "ctc_inside", "llama", "t5", "timm_vit", "hf_trainer_bf16", "accelerate_loop",
    "lightning_bf16",
)  # fmt: skip


def _recorded() -> dict[str, dict[str, str]]:
    """The committed rows, by program."""
    return {row["program"]: row for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"]}


def _result_of(cell: str) -> Result:
    return next(result for result in reversed(RESULTS) if cell == result or cell.startswith(f"{result}: "))


@pytest.mark.parametrize("program", [*CHOSEN, *map(slow, OTHERS)])
def test_programs_run_as_recorded(program: str) -> None:
    if libraries := missing(program):
        pytest.skip(f"{', '.join(libraries)} not installed: pip install 'memplan[programs]'")
    recorded = _recorded().get(program, {})
    verdicts = run(program, PROGRAMS[program].ways)
    expected = {way: _result_of(cell) for way, cell in recorded.items() if way in PROGRAMS[program].ways}
    worst = {v.way: expected.get(v.way, Result.REFUSED) for v in verdicts}  # a program that is not in the table yet
    worse = [v for v in verdicts if RESULTS.index(v.result) > RESULTS.index(worst[v.way])]
    assert not worse
    assert {v.way for v in verdicts} == set(PROGRAMS[program].ways) - {"eager"}


def test_no_program_of_the_table_is_wrong() -> None:
    rows = _recorded()
    assert len(rows) > 20
    assert rows.keys() <= PROGRAMS.keys()
    cells = {(name, way): row[way] for name, row in rows.items() for way in PROGRAMS[name].ways[1:]}
    assert [key for key, cell in cells.items() if _result_of(cell) is Result.WRONG] == []
