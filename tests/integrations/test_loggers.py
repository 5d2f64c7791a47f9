"""Loggers get the figures of plans as scalars, and one page: stand-ins, and TensorBoard and wandb if installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memplan.errors import UnsupportedCall
from memplan.integrations.loggers import PAGE, TAG, log_plan, loggers_of_trainer, require_loggers
from tests.samples import sample_plan

FIGURES = {"memplan/arena_bytes": 320.0, "memplan/graphs": 1.0}


class Writer:
    """The methods of `SummaryWriter` that are called."""

    def __init__(self, folder: Path) -> None:
        self.log_dir = str(folder)
        self.calls: list[tuple[Any, ...]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.calls.append((tag, text, step))

    def flush(self) -> None:
        self.calls.append(("flush",))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of a stand-in of wandb, which is the one that is going on."""
    wandb: Any = ModuleType("wandb")

    class Run:
        def __init__(self) -> None:
            self.logged: list[dict[str, Any]] = []

        def log(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

    Run.__module__ = "wandb.sdk.wandb_run"
    wandb.Html = lambda data, inject: SimpleNamespace(html=data, inject=inject)
    wandb.run = Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb.run


def test_a_writer_gets_scalars_text_and_the_page_beside_its_events(tmp_path: Path) -> None:
    writer, plan = Writer(tmp_path / "run"), sample_plan()
    log_plan(writer, plan, FIGURES, 3)
    assert writer.calls[:2] == [("memplan/arena_bytes", 320.0, 3), ("memplan/graphs", 1.0, 3)]
    tag, text, step = writer.calls[2]
    assert (tag, step) == (TAG, 3)
    assert [line[:4] for line in text.splitlines()] == ["    "] * len(str(plan).splitlines())
    assert writer.calls[3] == ("flush",)
    assert (tmp_path / "run" / PAGE).read_text() == plan.to_html()


def test_a_run_of_wandb_gets_scalars_and_the_page_together(run: Any) -> None:
    plan = sample_plan()
    log_plan(run, plan, FIGURES, 3)
    (logged,) = run.logged
    page = logged.pop(TAG)
    assert logged == FIGURES
    assert (page.html, page.inject) == (plan.to_html(), False)


def test_a_folder_gets_the_page(tmp_path: Path) -> None:
    log_plan(tmp_path / "a" / "b", sample_plan(), FIGURES, 3)
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == [PAGE]


def test_what_is_no_logger_is_refused(run: Any, tmp_path: Path) -> None:
    assert require_loggers([run, Writer(tmp_path), "folder", tmp_path])[0] is run
    with pytest.raises(UnsupportedCall, match=r"loggers\[1\]: is a logger of type int") as caught:
        require_loggers(["folder", 3])
    assert caught.value.see == "loggers"


def test_the_reporters_of_a_trainer_are_found(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's run that is going on, and the folder of TensorBoard's newest events."""
    monkeypatch.setattr("memplan.integrations.loggers._writer", Writer)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    for name, seconds in (("old", 10), ("new", 30), ("middle", 20)):
        events = tmp_path / "runs" / name / "events.out.tfevents.1.host"
        events.parent.mkdir(parents=True)
        events.touch()
        os.utime(events, (seconds, seconds))
    both = loggers_of_trainer(["tensorboard", "wandb", "mlflow"], str(tmp_path))
    assert both[0] is run
    assert both[1].log_dir == str(tmp_path / "runs" / "new")
    assert loggers_of_trainer(["mlflow"], str(tmp_path)) == ()
    assert loggers_of_trainer(["tensorboard"], str(tmp_path / "none")) == ()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs" / "old"))
    assert loggers_of_trainer(["tensorboard"], "nowhere")[0].log_dir == str(tmp_path / "runs" / "old")
    run_module: Any = sys.modules["wandb"]
    run_module.run = None
    assert loggers_of_trainer(["wandb"], str(tmp_path)) == ()


def test_tensorboard_itself_shows_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for _ in range(2):  # the reporter's events, and ours in the same folder
        with SummaryWriter(str(tmp_path)) as writer:
            assert require_loggers([writer]) == (writer,)
            log_plan(writer, sample_plan(), FIGURES, 1)
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert next((e.step, e.value) for e in shown.Scalars("memplan/arena_bytes")) == (1, 320.0)
    assert f"{TAG}/text_summary" in shown.Tags()["tensors"]
    assert (tmp_path / PAGE).exists()


def test_wandb_itself_keeps_the_page_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", project="memplan", dir=str(tmp_path))
    assert require_loggers([run]) == (run,)
    assert loggers_of_trainer(["wandb"], "nowhere") == (run,)
    log_plan(run, sample_plan(), FIGURES, 1)
    run.finish()
    (page,) = tmp_path.rglob("media/html/memplan/*.html")
    assert page.read_text() == sample_plan().to_html()
