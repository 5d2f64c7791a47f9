"""`MemplanCallback` for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from memplan.core.arguments import require_library
from memplan.errors import UnknownName

require_library("lightning", where=__name__, install="pip install lightning")

from lightning.pytorch import Callback  # noqa: E402

from memplan.integrations.planned_training import PlannedTraining, ShowsPlans  # noqa: E402

if TYPE_CHECKING:
    import os

    from torch import nn

    from memplan.runtime.options import RunKeywords


class MemplanCallback(ShowsPlans, Callback):  # type: ignore[misc]
    """A callback that compiles a LightningModule's forward when training starts, and logs its plans after a step.

    What `training_step` calls is compiled in place: the LightningModule itself (`self(x)`) and its direct submodules
    that have parameters to train (`self.net(x)`). `training_step` runs as it is, with its `self.log`. The figures
    go to the trainer's loggers every `log_every_n_steps`, the plans to the log named "memplan".

    Args:
        modules: The names of the submodules to compile instead ("" is the LightningModule itself).
        save_plans: A folder for the plans' files (`graph-0.json`, ...) and a page (`largest.html`); None: none.
        options: The options of `memplan.Backend`. A `budget` limits the total of each graph, and of all
            graphs of a step together.

    Attributes:
        figures: What was logged last: "memplan/planned_bytes" (the largest total of a graph), "memplan/arena_bytes",
            "memplan/graphs" (their number); on a GPU, the peaks so far of torch's allocator, "memplan/allocated_bytes"
            and "memplan/reserved_bytes".

    Raises:
        LibraryNotInstalled: lightning is not installed (when this module is imported).
        MemplanError: An option has no valid value.
        UnknownName: There is no submodule of a name in `modules` (when training starts).

    Example:
        ```python
        from memplan.integrations.lightning import MemplanCallback

        trainer = lightning.Trainer(callbacks=[MemplanCallback(budget="8GiB")])
        trainer.fit(module, data)
        ```
    """

    def __init__(
        self,
        modules: Sequence[str] | None = None,
        *,
        save_plans: str | os.PathLike[str] | None = None,
        **options: Unpack[RunKeywords],
    ) -> None:
        self._modules = modules
        self._training = PlannedTraining(save_plans=save_plans, **options)
        self.figures: dict[str, float] = {}
        self._logged = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile the modules in place.

        Args:
            trainer: The trainer.
            pl_module: The LightningModule.

        Raises:
            UnknownName: There is no submodule of a name in `modules`.
            UnsupportedCall: A module that is named was compiled by `memplan.compile` already.

        Example:
            ```python
            callback.on_fit_start(trainer, module)
            ```
        """
        self._training.compile(_modules_of(pl_module, self._modules))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the plans after the first batch, and the figures where the trainer logs a step.

        Args:
            trainer: The trainer, whose loggers get the figures.
            pl_module: The LightningModule.

        Example:
            ```python
            callback.on_train_batch_end(trainer, module, outputs, batch, 0)
            ```
        """
        step, every = trainer.global_step, trainer.log_every_n_steps
        logged = every and step % every == 0 and step != self._logged  # once for all batches of an update
        if not self.figures or logged:
            self._logged, self.figures = step, self._training.report()
            for logger in trainer.loggers if self.figures else ():
                logger.log_metrics(self.figures, step=max(0, step - 1))  # as Lightning counts


def _modules_of(model: nn.Module, names: Sequence[str] | None) -> Iterator[nn.Module]:
    """Yield the modules that are compiled: those that are named, or what a `training_step` usually calls."""
    from memplan.runtime.api.compiled_module import CompiledModule

    if names is None:
        trained = [m for m in model.children() if any(p.requires_grad for p in m.parameters())]
        yield from (m for m in (model, *trained) if not isinstance(m, CompiledModule))
        return
    for name in names:
        try:
            yield model.get_submodule(name)
        except AttributeError:
            hint = f"its direct submodules are: {', '.join(child for child, _ in model.named_children())}"
            raise UnknownName("is no submodule", where=f"modules: {name!r}", hint=hint, see="trainers") from None
