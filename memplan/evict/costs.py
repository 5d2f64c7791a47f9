"""Cost models: the seconds of an op, and of a copy between device and host, from a roofline model or measured.

The roofline model takes, for each op, the longer of its arithmetic at the device's peak rate and its bytes at the
memory's bandwidth, and adds a launch (Williams, Waterman, Patterson 2009). It ranks choices well, but does not predict
the time of a single kernel. `memplan.profile` measures the ops instead.

`Clock` and `simulate` predict the seconds of a step: ops run one after another, copies in a lane per direction,
collectives over one link. To start a copy or a collective, and to wait for a copy, takes a launch; what waits for it
waits until it is complete. So where copies hide behind ops, fewer of them take less time. Collectives of a rank share
its link, and run in the order in which they start, whatever their groups are.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from memplan.core.collectives import ALL_REDUCE, is_collective
from memplan.core.evictions import OFFLOAD, RELOAD, SAVE_RNG, SEND, TRANSFERS
from memplan.core.files import write_atomic
from memplan.core.gpus import GPUS, GpuTarget, described
from memplan.core.graph import Graph, Op, StorageKind, Value
from memplan.core.jsonio import from_json, read_json, to_json
from memplan.errors import InvalidCosts, UnreadableFile, located

VERSION = 1

_MATRIX = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm"})
_SEEDS = "inductor_seeds"  # the op that makes the seeds of generated kernels
_NARROW = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection for copies: a bandwidth (`bytes_per_second`) and a `latency` in seconds."""

    bytes_per_second: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < float("inf") or not 0 <= self.latency < float("inf"):
            raise InvalidCosts(
                f"a link of {self.bytes_per_second} bytes per second and {self.latency} seconds of latency",
                hint="give a positive bandwidth and a latency of at least 0, both finite",
            )

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that one copy of `nbytes` bytes takes."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True, repr=False)
class CostModel:
    """The seconds that ops and copies take on one kind of device.

    Args:
        name: The name of the device or of the measurement.
        matrix_flops: Floating-point operations per second of matrix products in 32 bits.
        narrow_flops: Floating-point operations per second of matrix products in 16 bits or fewer.
        bytes_per_second: The bandwidth of the device's memory.
        launch: Seconds that every op costs in addition.
        to_host: The link for copies from the device to the host.
        to_device: The link for copies from the host to the device.
        measured: Measured seconds by op signature (`signature_of`); these replace the roofline's.
        between_ranks: The link between the ranks of a process group, for collectives; a network of 400 Gbit/s.
        draw: Seconds to draw one random number, where that takes longer than to write it.
        updates: Bytes per second that an optimizer's update on the host reads and writes, beside the copies; 0: updates
            run on the device.

    Raises:
        InvalidCosts: A rate is not positive, or a time is negative, or either is not finite.

    Example:
        >>> from memplan.evict.costs import DEVICES
        >>> costs = dataclasses.replace(DEVICES["a100"], name="a100-sxm", bytes_per_second=2.0e12)
        >>> plan = memplan.plan(model, inputs, budget="8GiB", costs=costs)
    """

    name: str
    matrix_flops: float
    narrow_flops: float
    bytes_per_second: float
    launch: float
    to_host: Link
    to_device: Link
    measured: Mapping[str, float] = field(default_factory=dict)
    between_ranks: Link = Link(bytes_per_second=45e9, latency=15e-6)
    draw: float = 0.0
    updates: float = 0.0

    def __repr__(self) -> str:
        ops = f"{len(self.measured)} ops measured"
        return f"<CostModel of {described(self.name)}: {self.bytes_per_second:.3g} B/s, {ops}>"

    @property
    def basis(self) -> Literal["measured", "data sheet"]:
        """The source of its seconds: ops that were measured, or the rates of a data sheet."""
        return "measured" if self.measured else "data sheet"

    def __post_init__(self) -> None:
        rates = {"matrix_flops": self.matrix_flops, "narrow_flops": self.narrow_flops}
        rates |= {"bytes_per_second": self.bytes_per_second}
        for key, rate in rates.items():
            if not 0 < rate < float("inf"):
                raise InvalidCosts(f"is {rate}", where=key, hint="give a positive rate per second")
        for key, figure in {"launch": self.launch, "draw": self.draw, "updates": self.updates}.items():
            if not 0 <= figure < float("inf"):
                raise InvalidCosts(f"is {figure}", where=key, hint="give a finite number, at least 0")
        for key, seconds in self.measured.items():
            if not 0 <= seconds < float("inf"):
                raise InvalidCosts(f"is {seconds}", where=f"measured[{key!r}]", hint="give seconds, at least 0")
        object.__setattr__(self, "measured", MappingProxyType(dict(self.measured)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copying and pickling need, since a read-only mapping supports neither."""
        return partial(CostModel, **{**vars(self), "measured": dict(self.measured)}), ()

    def op_seconds(self, graph: Graph, op: Op) -> float:
        """Return the seconds of one op: the measured ones if there are any, otherwise the roofline's.

        Args:
            graph: The graph of the op.
            op: One of its ops.

        Returns:
            Seconds.

        Example:
            >>> costs.op_seconds(plan.graph, plan.graph.ops[0])
        """
        if op.on_host:
            return 0.0
        known = self.measured.get(signature_of(graph, op)) if self.measured else None
        if known is not None:
            return known
        if is_collective(op.target):
            return self.launch + self.between_ranks.seconds(_sent_bytes(graph, op))
        nbytes = sum(_value_bytes(graph, v) for v in dict.fromkeys((*_operands(graph, op), *op.writes)))
        widest = max((graph.values[v].dtype for v in op.reads), key=lambda d: d not in _NARROW, default="float32")
        rate = self.narrow_flops if widest in _NARROW else self.matrix_flops
        drawn = self.draw * _drawn(graph, op) if self.draw else 0.0
        return self.launch + drawn + max(flops_of(graph, op) / rate, nbytes / self.bytes_per_second)

    def seconds_on_host(self, graph: Graph, op: Op) -> float:
        """Return the seconds that an op of the host takes there, beside the device.

        Args:
            graph: The graph of the op.
            op: One of its ops.

        Returns:
            Seconds; 0 for an op of the device.

        Example:
            >>> sum(costs.seconds_on_host(plan.graph, op) for op in plan.graph.ops)
        """
        if not op.on_host:
            return 0.0
        kept = (v for v in op.writes if graph.storages[graph.values[v].storage].kind is not StorageKind.GRADIENT)
        nbytes = sum(_value_bytes(graph, v) for v in (*op.reads, *kept))
        return nbytes / self.updates if self.updates else float("inf")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as JSON, whole or not at all; `load_costs` reads it.

        Args:
            path: The file to write.

        Raises:
            UnreadableFile: The file cannot be written.

        Example:
            >>> memplan.profile(model, example_inputs).save("costs.json")
        """
        body = {"cost_model": VERSION, **to_json(self)}
        write_atomic(path, json.dumps(body, indent=1, allow_nan=False) + "\n")

    def seconds(self, graph: Graph) -> tuple[float, ...]:
        """Return the seconds of every op of a graph.

        Args:
            graph: The graph.

        Returns:
            Seconds, by the index of the op.

        Example:
            >>> sum(costs.seconds(plan.graph))
        """
        return tuple(self.op_seconds(graph, op) for op in graph.ops)


def load_costs(path: str | os.PathLike[str]) -> CostModel:
    """Read a cost model that `CostModel.save` wrote.

    Args:
        path: The JSON file.

    Returns:
        The cost model, for the `costs` argument of `memplan.plan` and `memplan.compile`.

    Raises:
        UnreadableFile: The file cannot be read, or holds no cost model of this version.
        InvalidCosts: A rate or a time in the file is impossible; the error names it.

    Example:
        >>> memplan.profile(model, inputs).save("costs.json")
        >>> plan = memplan.plan(model, inputs, budget="50%", costs=memplan.load_costs("costs.json"))
    """
    where = os.fspath(path)
    hint = "make it anew: memplan.profile(model, example_inputs).save(path)"
    data = read_json(where, hint)
    if not isinstance(data, dict) or data.pop("cost_model", None) != VERSION:
        raise UnreadableFile(f"is not a cost model of version {VERSION}", where=where, hint=hint)
    with located(where, hint):
        return from_json(CostModel, data, "costs")


def cost_model(costs: CostModel | str | os.PathLike[str]) -> CostModel:
    """Return the cost model of a known device (by name), of a `.json` file (by path), or `costs` itself if it is one.

    A name may have a link between ranks: "h100/nvlink", "a100/400gb".

    Raises `InvalidCosts` for anything else, and the errors of `load_costs`.
    """
    if isinstance(costs, CostModel):
        return costs
    if isinstance(costs, os.PathLike) or (isinstance(costs, str) and costs.endswith(".json")):
        return load_costs(costs)
    device, _, link = costs.lower().partition("/") if isinstance(costs, str) else ("", "", "")
    if device in DEVICES and link in LINKS:
        return replace(DEVICES[device], name=f"{device}/{link}", between_ranks=LINKS[link])
    if not isinstance(costs, str) or costs.lower() not in DEVICES:
        hint = f"choose one of: {', '.join(DEVICES)}, or measure one: memplan.profile(model, inputs)"
        if device in DEVICES:
            hint = f"choose a link between ranks: {', '.join(f'{device}/{name}' for name in LINKS)}"
        if costs == "measure":
            hint = f"memplan.compile and compile_step measure their first steps; here, {hint}"
        raise InvalidCosts(f"there is no cost model {costs!r}", where="costs", hint=hint)
    return DEVICES[costs.lower()]


def _sent_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes that a collective brings over a rank's link, of many ranks: the whole of what is divided.

    A sum that all ranks get is divided among them first, and gathered then.
    """
    whole = max(_value_bytes(graph, v) for v in (*op.reads, *op.writes))
    return 2 * whole if op.target == ALL_REDUCE else whole


def signature_of(graph: Graph, op: Op) -> str:
    """Return a text of what decides an op's time: its target, shapes, strides and dtypes.

    Equal calls have equal signatures, in any model.
    """

    def describe(index: int) -> str:
        v = graph.values[index]
        return f"{v.dtype}{list(v.shape)}{list(v.strides)}"

    operands = ", ".join(map(describe, _operands(graph, op)))
    return f"{op.target}({operands}) -> {', '.join(map(describe, op.writes))}"


def _operands(graph: Graph, op: Op) -> tuple[int, ...]:
    """Return what an op reads but for the state of a generator: numbers drawn again take the same time."""
    return op.reads if graph.saved_state(op) is None else op.reads[:-1]


def flops_of(graph: Graph, op: Op) -> float:
    """Return the floating-point operations of a matrix product, convolution or attention; 0 for memory-bound ops."""
    name = op.target.removeprefix("aten.").split(".")[0]
    reads = [graph.values[v] for v in op.reads]
    writes = [graph.values[v] for v in op.writes]
    if name in _MATRIX:
        matrices = [v for v in reads if len(v.shape) >= 2]
        if name.startswith(("add", "badd")) and len(reads[0].shape) >= 2:
            matrices = matrices[1:]  # the first is what is added to
        # A third may follow the factors: what the result is a part of.
        return 2.0 * prod(matrices[0].shape) * matrices[:2][-1].shape[-1] if matrices else 0.0
    if "convolution" in name:
        return _convolution_flops(name, reads, writes)
    if "attention" in name:
        return _attention_flops(name, reads)
    return 0.0


def _convolution_flops(name: str, reads: list[Value], writes: list[Value]) -> float:
    """Return 2 x result elements x kernel elements per output channel; in the backward, once per gradient computed."""
    images = [v for v in reads if len(v.shape) >= 3]
    if "backward" not in name:
        return 2.0 * prod(writes[0].shape) * prod(images[-1].shape[1:]) if len(images) > 1 and writes else 0.0
    if len(images) < 3:
        return 0.0
    grad, _, weight = images[:3]
    made = sum(len(v.shape) >= 3 for v in writes)
    return 2.0 * made * prod(grad.shape) * prod(weight.shape[1:])


def _attention_flops(name: str, reads: list[Value]) -> float:
    """Count two matrix products per head in the forward and five in the backward (FlashAttention, Dao 2022)."""
    heads = [v for v in reads if len(v.shape) == 4]
    if len(heads) < 2:
        return 0.0
    query, key = (heads[1], heads[2]) if "backward" in name and len(heads) > 2 else (heads[0], heads[1])
    products = 5 if "backward" in name else 2
    return 2.0 * products * prod(query.shape) * key.shape[-2]


def _drawn(graph: Graph, op: Op) -> int:
    """Return the random numbers that an op draws: one for each element of its largest result.

    A kernel of Inductor's draws them from seeds, which it reads.
    """
    seeded = any(graph.storages[graph.values[v].storage].origin.op == _SEEDS for v in op.reads)
    draws = op.random or seeded or graph.saved_state(op) is not None
    if not draws or op.target == SAVE_RNG:
        return 0
    return max((prod(graph.values[v].shape) for v in op.writes), default=0)


def _value_bytes(graph: Graph, index: int) -> int:
    """Return the bytes that a kernel moves for a value; of an expanded value, those of its storage."""
    v = graph.values[index]
    elements = prod(n for n, s in zip(v.shape, v.strides, strict=True) if s)
    return min(elements * v.itemsize, max(graph.storages[v.storage].nbytes, 1))


# What an H200 and an H100 reach of their data sheets (measured 2026-11-27, torch 2.11): 785 and 798 of 989 TFLOP/s in a
# product of 8192 x 8192 matrices in BF16, 4.3 of 4.8 and 3.0 of 3.35 TB/s in a copy. Others are taken to do so too.
_OF_PRODUCTS, _OF_BANDWIDTH = 0.8, 0.9


def _roofline(gpu: GpuTarget) -> CostModel:
    """Return the roofline of a GPU: the rates that it reaches."""
    link = Link(bytes_per_second=gpu.link, latency=10e-6)
    return CostModel(
        name=gpu.name,
        matrix_flops=_OF_PRODUCTS * gpu.tf32,
        narrow_flops=_OF_PRODUCTS * gpu.bf16,
        bytes_per_second=_OF_BANDWIDTH * gpu.bandwidth,
        launch=2e-6,
        to_host=link,
        to_device=link,
        updates=gpu.updates,
    )


_HOST_COPY = Link(bytes_per_second=8e9, latency=10e-6)
_CPU = CostModel(
    name="cpu",
    matrix_flops=0.1e12,
    narrow_flops=0.1e12,
    bytes_per_second=0.02e12,
    launch=3e-6,
    to_host=_HOST_COPY,
    to_device=_HOST_COPY,
    draw=12e-9,
)
DEVICES: Mapping[str, CostModel] = MappingProxyType({**{g.name: _roofline(g) for g in GPUS.values()}, "cpu": _CPU})

# Data sheets, one direction of each rank's link, and what collectives reach of it in practice (about 80 % and 90 %).
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink": Link(bytes_per_second=360e9, latency=15e-6),
        "400gb": Link(bytes_per_second=45e9, latency=15e-6),
        "200gb": Link(bytes_per_second=22e9, latency=15e-6),
        "100gb": Link(bytes_per_second=11e9, latency=20e-6),
    }
)


_LINK, ON_HOST = "link between ranks", "updates on the host"


class Clock:
    """The predicted time of a step while its ops run, in seconds from its start.

    `now` is the time at which the next op can run, `stall` the part of it that was spent waiting. `ends`: when each
    copy and collective that is under way is complete, by the storages that it reads and writes.

    `one_link`: all process groups of a rank share its link; otherwise each has one that is as fast, which is the most
    that groups could bring.
    """

    def __init__(self, graph: Graph, costs: CostModel, *, one_link: bool = True) -> None:
        self._graph, self._costs, self._one_link = graph, costs, one_link
        self._copies: dict[str, Callable[[int], float]] = {
            OFFLOAD: costs.to_host.seconds,
            RELOAD: costs.to_device.seconds,
            SEND: costs.to_device.seconds,
        }
        self._free = defaultdict[str, float](float)  # when each lane has done what is queued
        self.now = self.stall = 0.0
        self.ends: dict[tuple[int, int], float] = {}

    def run(self, op: Op) -> None:
        """Run the next op.

        A collective that is not started before it is waited for counts as an op, and waiting for the link before it as
        waiting.
        """
        graph, costs, free = self._graph, self._costs, self._free
        pair, link = (-1, -1), _LINK if self._one_link else f"{_LINK}, {op.group}"
        if op.target in TRANSFERS or op.starts:
            pair = graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage
        if op.starts:
            self.now += costs.launch
            free[link] = max(self.now, free[link]) + costs.op_seconds(graph, op) - costs.launch
            self.ends[pair] = free[link]
        elif is_collective(op.target):
            self._wait(free[link])
            self.now = free[link] = self.now + costs.op_seconds(graph, op)
        elif op.target in self._copies:
            self.now += costs.launch
            took = self._copies[op.target](graph.storages[pair[0]].nbytes)
            self.ends[pair] = free[op.target] = max(self.now, free[op.target]) + took
        elif op.target in TRANSFERS:
            self.now += costs.launch
            self._wait(self.ends.pop(pair))
        elif op.on_host:
            free[ON_HOST] = max(self.now, free[ON_HOST]) + costs.seconds_on_host(graph, op)
        else:
            self.now += costs.op_seconds(graph, op)

    @property
    def host_end(self) -> float:
        """The second at which the host's ops so far end."""
        return self._free[ON_HOST]

    def finish(self) -> None:
        """End the step, which waits for the host's ops."""
        self._wait(self.host_end)

    def _wait(self, end: float) -> None:
        self.stall += max(0.0, end - self.now)
        self.now = max(self.now, end)


def simulate(graph: Graph, costs: CostModel, *, one_link: bool = True) -> tuple[float, float]:
    """Return the predicted seconds of a step whose ops are in schedule order, and those of them spent waiting.

    `one_link`: as in `Clock`.
    """
    clock = Clock(graph, costs, one_link=one_link)
    for op in graph.ops:
        clock.run(op)
    clock.finish()
    return clock.now, clock.stall


def busy_seconds(graph: Graph, costs: CostModel) -> dict[str, float]:
    """Return the predicted seconds of a step whose ops are in schedule order, and for how many each lane is busy:
    that of the host's ops too, if there are any."""
    found = {"step": simulate(graph, costs)[0], "kernels": 0.0, "copies to the device": 0.0, "copies to the host": 0.0}
    for op in graph.ops:
        if op.target in (OFFLOAD, RELOAD):
            lane, link = ("host", costs.to_host) if op.target == OFFLOAD else ("device", costs.to_device)
            nbytes = graph.storages[graph.values[op.reads[0]].storage].nbytes
            found[f"copies to the {lane}"] += link.seconds(nbytes)
        elif op.on_host:
            found[ON_HOST] = found.get(ON_HOST, 0.0) + costs.seconds_on_host(graph, op)
        elif op.target not in TRANSFERS:
            found["kernels"] += costs.op_seconds(graph, op)
    return found
