"""The answer to "does it fit": what a training step and its update need on a device, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memplan.core.graph import StorageKind
from memplan.core.later import later
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.planning.capacity import Capacity

GIVEN_BACK = 0.05  # share of the peak that giving an idle arena back must save on the host, where it costs page faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The parts, in bytes, of what one step and the update of its parameters need together.

    `arena` has the gradients that stay in it, `gradients`. `during` is the most that forward and backward allocate
    beside it at once, `kept` what of it is alive when the optimizer runs, and `temporaries` what the optimizer then
    allocates beside its `state`. `given_back`: the arena makes room for the update, but for the gradients in it.
    """

    parameters: int
    state: int
    inputs: int
    arena: int
    gradients: int
    during: int
    kept: int
    temporaries: int
    given_back: bool

    @property
    def fixed(self) -> int:
        """The bytes that no plan changes: the model, the optimizer's state, the inputs."""
        return self.parameters + self.state + self.inputs

    @property
    def in_update(self) -> int:
        """The bytes that the update needs where the arena makes room for it."""
        return self.fixed + self.gradients + self.kept + self.temporaries

    @property
    def beside(self) -> int:
        """The most bytes beside arena, model and inputs: in forward and backward, or in the update."""
        return max(self.during, self.kept + self.temporaries - (self.arena - self.gradients) * self.given_back)

    @property
    def total(self) -> int:
        """The most bytes at once."""
        return self.fixed + self.arena + self.beside


def need_of(plan: Plan, *, state: int, temporaries: int, is_host: bool) -> Need:
    """Return what the step of a plan needs with an optimizer of `state` bytes whose `step()` allocates `temporaries`.

    An arena that lies idle while the optimizer runs is given back, on the host (`is_host`) where that saves enough.
    """
    graph = plan.graph
    model = (StorageKind.PARAMETER, StorageKind.CONSTANT)
    need = Need(
        parameters=graph.bytes_of(*model),
        state=state + graph.bytes_of(StorageKind.OPTIMIZER_STATE),
        inputs=graph.bytes_of(StorageKind.INPUT, StorageKind.TANGENT),
        arena=plan.arena_size,
        gradients=sum(graph.storages[s].nbytes for s in graph.gradients_in_arena),
        during=max(plan.outside_profile, default=0),
        kept=plan.outside["gradients"] + plan.outside["outputs"],
        temporaries=temporaries,
        given_back=True,
    )
    kept = replace(need, given_back=False)
    return kept if is_host and kept.total - need.total <= GIVEN_BACK * kept.total else need


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fits:
    """Whether a training step fits a device: true as a condition if it does.

    Args:
        model: The name of the model.
        capacity: The memory of the device; sizes are bytes.
        need: What the step needs, by parts; bytes.
        eager: What eager is predicted to need, with the same allowance; bytes.
        batch: The samples of a step; None where the inputs show no batch.
        optimizer: The name of the optimizer, "none" without one.
        dtypes: The types of the parameters.
        train: Forward, backward and update, or the forward alone.
        largest_batch: The largest batch that fits, slack kept; 0 if not even one sample fits (or the
            fewest that the model takes), None if unknown.
        seconds: The predicted seconds of forward and backward; None without the costs of the device.
        within: Where the step does not fit: the cheapest plan that does (`memplan.compile` takes it, or its budget).
        smallest: Where no plan fits either: the fewest bytes that one needs, as `total` counts them.
        plan: The plan of the step without a budget.

    Example:
        >>> answer = memplan.fits(model, batch, device="h100")
        >>> answer.fits, answer.total, answer.largest_batch
    """

    model: str
    capacity: Capacity
    need: Need
    eager: int
    batch: int | None
    optimizer: str
    dtypes: tuple[str, ...]
    train: bool
    largest_batch: int | None
    seconds: float | None
    smallest: int | None = None
    plan: Plan = field(compare=False)
    within: Plan | None = field(default=None, compare=False)

    @property
    def total(self) -> int:
        """The bytes that the step needs on the device, with the allowance for context and libraries."""
        return self.need.total + self.capacity.allowance

    @property
    def fits(self) -> bool:
        """Whether the step fits, with the slack left free."""
        return self.need.total <= self.capacity.usable

    def __bool__(self) -> bool:
        return self.fits

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        sizes = f"{format_bytes(self.total)} of {format_bytes(self.capacity.total)}"
        return f"<{self.model or 'the model'} {verdict} {self.capacity.device}: {sizes}>"

    def __str__(self) -> str:
        """Return the answer as plain text, as the command line prints it."""
        text: str = later("fits_text")(self)
        return text
