"""`MemplanCallback` for the Trainer of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from memplan.core.arguments import require_library

require_library("transformers", where=__name__, install="pip install transformers accelerate")

from transformers import TrainerCallback  # noqa: E402

from memplan.integrations.planned_training import PlannedTraining, ShowsPlans  # noqa: E402

if TYPE_CHECKING:
    import os

    from memplan.runtime.options import RunKeywords


class MemplanCallback(ShowsPlans, TrainerCallback):  # type: ignore[misc]
    """A callback that compiles the model when training starts, and logs its plans after the first step.

    The model is compiled in place, as by `model.compile(backend="memplan")`: its class, its signature, checkpoints and
    `save_pretrained` stay as they are. The figures are logged beside each loss, and are in `trainer.state.log_history`;
    the plans go to the log named "memplan".

    Args:
        save_plans: A folder for the plans' files (`graph-0.json`, ...) and a page (`largest.html`); None: none.
        options: The options of `memplan.Backend`. A `budget` limits the total of each graph, and of all
            graphs of a step together.

    Attributes:
        figures: What was logged last: "memplan/planned_bytes" (the largest total of a graph), "memplan/arena_bytes",
            "memplan/graphs" (their number); on a GPU, the peaks so far of torch's allocator, "memplan/allocated_bytes"
            and "memplan/reserved_bytes".

    Raises:
        LibraryNotInstalled: transformers is not installed (when this module is imported).
        MemplanError: An option has no valid value.
        UnsupportedCall: The model was compiled by `memplan.compile` already (when training starts).

    Example:
        ```python
        from memplan.integrations.transformers import MemplanCallback

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[MemplanCallback(budget="8GiB")])
        trainer.train()
        ```
    """

    def __init__(self, *, save_plans: str | os.PathLike[str] | None = None, **options: Unpack[RunKeywords]) -> None:
        self._training = PlannedTraining(save_plans=save_plans, **options)
        self.figures: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compile the model in place.

        Args:
            args: The arguments of the Trainer.
            state: Its state.
            control: Its switches.
            model: The model.
            kwargs: What the Trainer passes beside them.

        Raises:
            UnsupportedCall: The model was compiled by `memplan.compile` already.

        Example:
            ```python
            callback.on_train_begin(arguments, trainer.state, trainer.control, model=model)
            ```
        """
        self._training.compile([model])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the plans after the first step.

        Args:
            args: The arguments of the Trainer.
            state: Its state.
            control: Its switches.
            kwargs: What the Trainer passes beside them.

        Example:
            ```python
            callback.on_step_end(arguments, trainer.state, trainer.control)
            ```
        """
        if not self.figures:
            self.figures = self._training.report()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the figures to the loss in the history, and in the logs for the callbacks that come after this one.

        Args:
            args: The arguments of the Trainer.
            state: Its state, whose history gets the figures.
            control: Its switches.
            logs: What is logged.
            kwargs: What the Trainer passes beside them.

        Example:
            ```python
            callback.on_log(arguments, trainer.state, trainer.control, logs={"loss": 0.5})
            ```
        """
        if logs is not None and "loss" in logs:
            self.figures = self._training.report()
            for entry in (logs, *state.log_history[-1:]):
                entry.update(self.figures)
