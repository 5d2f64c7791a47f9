"""Measures what kernels of this machine allocate for themselves: each kind of call runs once, on zeros.

A trace shows an op's results, and not the memory in which its kernel reorders operands or gathers sums. Only kernels
are run that are known to take some, and none whose tensors are larger than `MOST`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memplan.core.graph import Graph
from memplan.core.totals import functional_transient, known_transient
from memplan.devices.kinds import is_accelerator, is_available
from memplan.devices.measure import peak_bytes
from memplan.trace.traced import KernelCall, Ref

_CPU = torch.device("cpu")
MOST = 1 << 30  # bytes of the tensors of a call that is run
_NAMES = (
    "convolution",
    "convolution_backward",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    *(f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "efficient", "flash")),
    *(f"_scaled_dot_product_{name}_attention_backward" for name in ("cudnn", "efficient", "flash")),
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "native_batch_norm_backward",
)
_MEASURED = frozenset(f"aten::{name}" for name in _NAMES)


@dataclass(frozen=True, slots=True)
class Like:
    """The size, strides and type of a tensor, and which memory it is in: what decides what a kernel allocates.

    oneDNN's LSTM copies its cell state where that is in the memory of the hidden state, as the zeros are that stand
    for both. `memory` tells the memories of the arguments of one call apart.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    memory: int

    @property
    def nbytes(self) -> int:
        """The bytes from the first element of the tensor to its last."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return such a tensor in a memory of bytes."""
        return memory[: self.nbytes].view(self.dtype).as_strided(self.shape, self.strides)


_KNOWN = (Like, bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True, slots=True)
class SizedCall:
    """A call of a kernel: its op, and its arguments, with a `Like` for each tensor."""

    target: OpOverload
    leaves: tuple[Any, ...]
    spec: Any

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Like))


@dataclass(slots=True)
class KernelScratch:
    """Knows what kernels of a device allocate beside their results; equal calls are run once.

    `unknown` are calls that were not run, because their tensors are too large or they refuse zeros: they count as 0.
    """

    device: torch.device = _CPU
    unknown: set[SizedCall] = field(default_factory=set)
    _known: dict[SizedCall, int] = field(default_factory=dict)

    def measure(self, calls: Iterable[SizedCall]) -> None:
        """Run those of the calls that are not known yet."""
        new = [call for call in dict.fromkeys(calls) if call not in self._known]
        self._known.update(dict.fromkeys(new, 0))
        runs = [_ScratchRun(call) for call in new if call.nbytes <= MOST]
        thunks = [step for run in runs for step in (run.prepare, run.run, run.free)]
        if thunks:
            drawn = [self.device] if is_accelerator(self.device) else []
            with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(drawn), self.device:
                peaks = peak_bytes(thunks, self.device)[1::3]
            self._known.update({run.call: max(peak - run.made, 0) for run, peak in zip(runs, peaks, strict=True)})
        self.unknown.update(set(new) - {run.call for run in runs if not run.refused})

    def of(self, call: SizedCall) -> int:
        """Return the bytes that a measured call allocates beside its results."""
        return self._known[call]

    def of_graph(self, graph: Graph, kernels: Sequence[Any]) -> tuple[int, ...]:
        """Return the transient bytes of each op of a traced graph: fresh results that are copied, and scratch.

        Where the device is not here, they are those that are known before anything ran.
        """
        if not is_available(self.device.type):
            return known_transient(graph)
        calls = [_call_of_op(graph, kernel) if isinstance(kernel, KernelCall) else None for kernel in kernels]
        self.measure(call for call in calls if call is not None)
        scratch = (0 if call is None else self.of(call) for call in calls)
        return tuple(a + b for a, b in zip(functional_transient(graph), scratch, strict=True))


def _call_of_op(graph: Graph, kernel: KernelCall) -> SizedCall | None:
    """Return the call of an op; None for one whose kernel takes no memory for itself, and where a tensor is empty."""
    target = kernel.target
    if not isinstance(target, OpOverload) or target._schema.name not in _MEASURED:
        return None
    memories: dict[int, int] = {}

    def like(leaf: Any) -> Any:
        """Return the `Like` of the value that a leaf refers to, and anything else as it is."""
        if not isinstance(leaf, Ref):
            return leaf
        value = graph.values[leaf.value]
        memory = memories.setdefault(value.storage, len(memories))
        return Like(value.shape, value.strides, getattr(torch, value.dtype), memory)

    leaves, spec = tree_flatten((tuple(kernel.args), dict(kernel.kwargs)))
    found = tuple(map(like, leaves))
    runs = all(isinstance(leaf, _KNOWN) and not (isinstance(leaf, Like) and 0 in leaf.shape) for leaf in found)
    return SizedCall(target, found, spec) if runs else None


@dataclass(slots=True)
class _ScratchRun:
    """A call on zeros; `made` are the bytes of its results in memory of their own."""

    call: SizedCall
    made: int = 0
    refused: bool = False
    _given: Any = None
    _results: Any = None

    def prepare(self) -> None:
        """Make the arguments."""
        needed: dict[int, int] = {}
        for leaf in self.call.leaves:
            if isinstance(leaf, Like):
                needed[leaf.memory] = max(needed.get(leaf.memory, 0), leaf.nbytes)
        memories = {memory: torch.zeros(nbytes, dtype=torch.uint8) for memory, nbytes in needed.items()}
        leaves = [leaf.within(memories[leaf.memory]) if isinstance(leaf, Like) else leaf for leaf in self.call.leaves]
        self._given = tree_unflatten(leaves, self.call.spec)

    def run(self) -> None:
        """Call the kernel."""
        args, kwargs = self._given
        try:
            self._results = self.call.target(*args, **kwargs)
        except RuntimeError:
            self.refused = True

    def free(self) -> None:
        """Note the bytes of the results, and free all."""
        given = {t.untyped_storage()._cdata for t in tree_leaves(self._given) if isinstance(t, torch.Tensor)}
        results = (t for t in tree_leaves(self._results) if isinstance(t, torch.Tensor))
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in results}
        self.made = sum(nbytes for key, nbytes in own.items() if key not in given)
        self._given = self._results = None
