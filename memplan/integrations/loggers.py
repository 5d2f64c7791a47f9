"""Writes figures of plans, and the page of one, to what a training run logs to: TensorBoard, wandb, or a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.core.files import write_atomic
from memplan.errors import UnsupportedCall

if TYPE_CHECKING:
    from memplan.core.plan import Plan

PAGE = "memplan-largest.html"
TAG = "memplan/largest"
_EVENTS = "events.out.tfevents.*"  # the files of TensorBoard


def is_writer(logger: Any) -> bool:
    """Return whether it is a `SummaryWriter`, torch's or tensorboardX's, or has its methods."""
    return all(callable(getattr(type(logger), name, None)) for name in ("add_scalar", "add_text"))


def is_run(logger: Any) -> bool:
    """Return whether it is a run of wandb."""
    return type(logger).__module__.partition(".")[0] == "wandb" and callable(getattr(logger, "log", None))


def require_loggers(loggers: Iterable[Any]) -> tuple[Any, ...]:
    """Return the loggers. Raises `UnsupportedCall` for one that is none that is known."""
    given = tuple(loggers)
    for i, logger in enumerate(given):
        if not (is_writer(logger) or is_run(logger) or isinstance(logger, (str, os.PathLike))):
            what = f"is a logger of type {type(logger).__name__}, which is not known"
            hint = "give a SummaryWriter, a run of wandb or a folder; or log callback.figures yourself"
            raise UnsupportedCall(what, where=f"loggers[{i}]", hint=hint, see="loggers")
    return given


def log_plan(logger: Any, plan: Plan, figures: Mapping[str, float], step: int) -> None:
    """Log figures as scalars, and the page of a plan as one file.

    TensorBoard shows no pages: it gets the report as text, and the page lies beside its events. A folder gets the page
    alone.

    Args:
        logger: One of those of `require_loggers`.
        plan: The plan that is shown.
        figures: The scalars, by tag; empty where they are logged already.
        step: The step of the training run.

    Example:
        ```python
        log_plan(SummaryWriter("runs/one"), plan, {"memplan/arena_bytes": 4096.0}, step=1)
        ```
    """
    if is_writer(logger):
        for tag, value in figures.items():
            logger.add_scalar(tag, value, step)
        logger.add_text(TAG, "\n".join(f"    {line}" for line in str(plan).splitlines()), step)  # markdown: as it is
        logger.flush()
        folder = getattr(logger, "log_dir", None) or getattr(logger, "logdir", None)
    elif is_run(logger):
        page = sys.modules["wandb"].Html(plan.to_html(), inject=False)
        logger.log({**figures, TAG: page})
        return
    else:
        folder = logger
    if isinstance(folder, (str, os.PathLike)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomic(Path(folder) / PAGE, plan.to_html())


def loggers_of_trainer(report_to: Iterable[str], output: str) -> tuple[Any, ...]:
    """Return what the reporters of a Trainer of transformers write to: the run of wandb, and TensorBoard's folder.

    The reporters do not say. wandb has one run at a time; TensorBoard's events are those written last in the folder
    that its reporter takes (`TENSORBOARD_LOGGING_DIR`, else `runs` in the trainer's output).
    """
    found: list[Any] = []
    names = set(report_to)
    run = getattr(sys.modules.get("wandb"), "run", None)
    if "wandb" in names and run is not None:
        found.append(run)
    if "tensorboard" in names:
        root = Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(output, "runs")).expanduser()
        events = sorted(root.rglob(_EVENTS), key=lambda file: file.stat().st_mtime_ns)
        if events:
            found.append(_writer(events[-1].parent))
    return tuple(found)


def _writer(folder: Path) -> Any:
    """Return a writer whose events TensorBoard shows together with those that are in a folder."""
    try:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        writer = import_module("tensorboardX").SummaryWriter
    return writer(str(folder))
