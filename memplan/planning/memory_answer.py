"""The answer to "does it fit": what a training step and its update need, part by part, and the memory of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memplan.core.gpus import ALIASES, GpuTarget, find_gpu
from memplan.core.graph import StorageKind
from memplan.core.host_limit import host_memory
from memplan.core.later import later
from memplan.core.plan import Plan
from memplan.core.units import format_bytes, parse_percent
from memplan.errors import InvalidSize, UnsupportedDevice, located
from memplan.planning.options import read_size

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
        compiled: What `torch.compile(model)` is predicted to need by itself, likewise; None unless the kernels of a
            training step are those that Inductor generates for a named GPU, and where torch finds no single graph.
        batch: The samples of a step; None where the inputs show no batch.
        optimizer: The name of the optimizer, "none" without one.
        dtypes: The types of the parameters.
        train: Forward, backward and update, or the forward alone.
        largest_batch: The largest batch that fits, slack kept; 0 if not even one sample fits (or the
            fewest that the model takes), None if unknown.
        seconds: The predicted seconds of forward and backward; None without the costs of the device.
        within: Where the step does not fit: the cheapest plan that does (`memplan.compile` takes it, or its budget);
            where none does with the model on a named GPU, that of the whole step while the model stays on the CPU.
        lanes: The predicted seconds of that whole "step", and for how many its "kernels", "copies to the device",
            "copies to the host" and "updates on the host" (if there are any) are busy; None for other plans.
        smallest: Where no plan fits either: the fewest bytes that one needs, as `total` counts them.
        unmeasured: Kernels of this machine whose own memory could not be measured, and is not counted.
        plan: The plan of the step without a budget.

    Example:
        >>> answer = memplan.fits(model, batch, target="h100")
        >>> answer.fits, answer.total, answer.largest_batch
    """

    model: str
    capacity: Capacity
    need: Need
    eager: int
    compiled: int | None
    batch: int | None
    optimizer: str
    dtypes: tuple[str, ...]
    train: bool
    largest_batch: int | None
    seconds: float | None
    lanes: Mapping[str, float] | None = None
    smallest: int | None = None
    unmeasured: int = 0
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


HOST = "cpu"
SLACK = 0.05  # share of the device that is left free unless the user says otherwise
ALLOWANCE = 1 << 30  # bytes: a context, its kernels, and the workspaces of cuBLAS and cuDNN


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The memory of a device. All sizes are bytes.

    `allowance` is what the device's context and libraries take (assumed, not measured), `slack` what is left free on
    purpose. `costs` names the cost model of the device; "" where only its size is known (an accelerator's). `gpu`: what
    was named, if it is one.
    """

    device: str
    total: int
    allowance: int
    slack: int
    costs: str = ""
    gpu: GpuTarget | None = None

    @property
    def is_host(self) -> bool:
        """Whether it is the memory of this machine itself, and no accelerator's."""
        return self.costs == HOST

    @property
    def usable(self) -> int:
        """The bytes that the model and its step may use together."""
        return self.total - self.allowance - self.slack


def capacity_of(
    device: str | int, *, allowance: int | str | None = None, slack: int | float | str | None = None
) -> Capacity:
    """Return the memory of a device.

    Args:
        device: A GPU, as `find_gpu` takes it; "cpu", the memory of this machine; or a size: a number of bytes, or a
            text such as "24GiB".
        allowance: Bytes for the context and libraries; None: `ALLOWANCE` for a device, and none for a size.
        slack: What stays free: bytes, or a share of the device (0.05, "5%"); None: `SLACK`.

    Raises:
        UnsupportedDevice: The device is unknown.
        InvalidSize: A size or a share has no valid value, or nothing is left for the step.
    """
    if not isinstance(device, (str, int)) or isinstance(device, bool):
        hint = f"name a GPU ('h100'), '{HOST}', or its memory ('24GiB')"
        what = f"is a {type(device).__name__}, and names no device"
        raise InvalidSize(what, where="target", hint=hint)
    text, gpu = device.strip().lower() if isinstance(device, str) else "0", None
    if text == HOST:
        total, costs, usual = host_memory() or 0, HOST, ALLOWANCE
        if not total:
            what = "this system does not say how much memory it has"
            raise UnsupportedDevice(what, where="target", hint="give its memory: 24GiB", see="unknown-memory")
    elif text in ALIASES or not text[:1].isdigit():
        try:
            gpu = find_gpu(str(device))
        except UnsupportedDevice as error:
            error.hint = f"{error.hint}; {HOST}; or a memory alone, as 24GiB"
            raise
        total, costs, usual = gpu.memory, gpu.costs, ALLOWANCE
    else:
        total, costs, usual = read_size("target", device), "", 0
    taken = usual if allowance is None else read_size("allowance", allowance)
    free = _slack(slack, total)
    if total <= taken + free:
        what = f"of {format_bytes(total)}, {format_bytes(taken)} are the context's and {format_bytes(free)} stay free"
        raise InvalidSize(
            f"{what}: nothing is left", where="target", hint="give more memory, or less slack or allowance"
        )
    return Capacity(device=str(device), total=total, allowance=taken, slack=free, costs=costs, gpu=gpu)


def _slack(slack: int | float | str | None, total: int) -> int:
    """Return the bytes that stay free. Raises `InvalidSize`."""
    if slack is None or isinstance(slack, float) or (isinstance(slack, str) and slack.strip().endswith("%")):
        with located("slack"):
            share = SLACK if slack is None else float(parse_percent(slack)) if isinstance(slack, str) else slack
        if not 0 <= share < 1:
            raise InvalidSize(f"{slack!r} is not a share from 0 to 1", where="slack", hint="write 5% or 2GiB")
        return int(total * share)
    return read_size("slack", slack)
