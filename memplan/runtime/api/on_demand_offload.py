"""On-demand offload: runs a call that has no plan, and offloads its saved activations when the budget is reached.

Capuchin calls this the passive mode. The model runs eagerly, and the live bytes that its ops allocate on the device are
counted. Before an op would exceed the budget, the activation that was saved first (the backward reads it last) is
copied to the host; it is copied back when the backward needs it. Results and gradients are those of eager. As in
planned steps, parameters, inputs, gradients of parameters and the temporaries of kernels are not counted. The arena is
not used.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.devices.kinds import is_accelerator
from memplan.errors import MemplanError, StaleActivationsError


class SavedBlock:
    """The bytes of a saved storage, on the device or on the host; `fetch` allocates memory on the device for them."""

    def __init__(self, fetch: Callable[[int], torch.UntypedStorage], nbytes: int) -> None:
        self.fetch, self.nbytes = fetch, nbytes
        self.saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self.host: torch.Tensor | None = None
        self.back: torch.UntypedStorage | None = None

    @property
    def present(self) -> bool:
        """Whether the block has bytes on the device."""
        return self.host is None or self.back is not None

    def evict(self) -> int:
        """Release the bytes on the device; return how many bytes were copied to the host."""
        copied = 0
        if self.host is None:
            source = _whole(next(s.tensor for s in self.saved if s.tensor is not None).untyped_storage(), self.nbytes)
            self.host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=is_accelerator(source.device))
            with torch.no_grad():
                self.host.copy_(source)
            copied = self.nbytes
        self.back = None
        for saved in self.saved:
            saved.leave()
        return copied

    def storage(self) -> torch.UntypedStorage:
        """Return the bytes on the device, copied back from the host if needed."""
        if self.back is None:
            assert self.host is not None
            back = self.fetch(self.nbytes)
            with torch.no_grad():
                _whole(back, self.nbytes).copy_(self.host)
            self.back = back
        return self.back


class SavedTensor:
    """A tensor that a node of autograd saved; with `block` None it is never offloaded."""

    __slots__ = ("__weakref__", "block", "changed", "layout", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, block: SavedBlock | None) -> None:
        self.tensor: torch.Tensor | None = tensor.detach() if block is not None else tensor
        self.version, self.changed = tensor._version, False
        self.layout = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()) if block else None
        self.block = block
        if block is not None:
            block.saved.add(self)

    def leave(self) -> None:
        """Drop the tensor before its bytes are offloaded, and store whether it was changed since it was saved."""
        if self.tensor is not None:
            self.changed = self.tensor._version != self.version
            self.tensor = None

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raises `StaleActivationsError` if it was changed in place since it was saved."""
        if self.changed or (self.tensor is not None and self.tensor._version != self.version):
            raise StaleActivationsError(
                "a tensor that the backward needs was changed in place after it was saved",
                where='on_mismatch="passive"',
                hint="change it after the backward, or change a copy",
                see="changed-after-forward",
            )
        if self.tensor is not None:
            return self.tensor
        assert self.block is not None
        assert self.layout is not None
        dtype, offset, shape, strides = self.layout
        storage = self.block.storage()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def _whole(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))


class LiveBytes:
    """The live bytes of storages on `device` that were added. `peak`: the most bytes that were alive at once.

    Freed storages are subtracted only when the number is needed; until then, the bytes that were alive at the last
    count and all that were added since are an upper bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    @property
    def nbytes(self) -> int:
        """The bytes that are alive now."""
        for key, (weak, nbytes) in list(self._known.items()):
            if weak.expired():  # type: ignore[no-untyped-call]
                del self._known[key]
                self._at_most -= nbytes
        return self._at_most

    def exceeds(self, limit: int) -> bool:
        """Return whether more than `limit` bytes are alive."""
        return self._at_most > limit and self.nbytes > limit

    def add(self, tensors: Sequence[Any]) -> None:
        """Count the storages of these tensors."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device == self.device and is_plain(tensor):
                storage = tensor.untyped_storage()
                weak, nbytes = self._known.get(storage._cdata, (None, 0))
                if weak is None or weak.expired():  # type: ignore[no-untyped-call]
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                    self._at_most += storage.nbytes() - nbytes
        if self.exceeds(self.peak):
            self.peak = self._at_most


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain strided tensor: no subclass, no lazy conjugate or negation, not quantized."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


_log = logging.getLogger("memplan")
# nodes that return the gradient of a parameter as a view
_VIEWS = ("TBackward", "ViewBackward", "TransposeBackward", "PermuteBackward", "ReshapeAliasBackward", "UnsafeView")


def offload_within(plan: Plan, device: torch.device, reason: MemplanError | None = None) -> OnDemandOffload | None:
    """Return what runs a call that has no plan within the budget of `plan`; None without a budget.

    `reason`: why it has none, for a warning in the log; None: that is said already.
    """
    eviction = plan.eviction  # the budget of another device does not apply to the host, where the model is
    budget = None if eviction is None or eviction.device else plan.arena_limit
    if reason is not None:
        how = "eagerly" if budget is None else f"eagerly within {format_bytes(budget)}"
        _log.warning("%s: a call runs %s, without a plan: %s", plan.model, how, reason.summary)
    return None if budget is None else OnDemandOffload(budget, device)


def run_within(
    offload: OnDemandOffload | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return `function(*args, **kwargs)`, run within the budget of `offload`; None: without a budget."""
    return function(*args, **kwargs) if offload is None else offload.run(function, *args, **kwargs)


class OnDemandOffload:
    """Runs one call and its backward within `budget` bytes of `device`, if possible.

    `live_bytes` counts them; `evicted` and `fetched` are the bytes that were copied to the host and
    back.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.live_bytes = LiveBytes(device)
        self.evicted = self.fetched = 0
        self._blocks: weakref.WeakValueDictionary[int, SavedBlock] = (
            weakref.WeakValueDictionary()
        )  # in the order of saving, the oldest first
        self._ages = count()
        self._block_of: weakref.WeakValueDictionary[int, SavedBlock] = (
            weakref.WeakValueDictionary()
        )  # by the storage's address
        self._reserved = 0

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` and return its result; its backward, whenever it runs, is kept within the budget too."""
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given = {x.grad_fn for x in inputs if x.grad_fn is not None}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, SavedTensor.unpack), _Watch(self):
            result = function(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        for node in _nodes(tensors, given):
            self._watch_node(node, given)
        return result

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        return self.live_bytes.peak

    # -- bytes -------------------------------------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Offload saved activations, the oldest first, until `nbytes` more fit or none is left."""
        free = self.budget - nbytes - self._reserved
        if not self.live_bytes.exceeds(free):
            return
        for block in list(self._blocks.values()):
            if block.present:
                self.evicted += block.evict()
                if not self.live_bytes.exceeds(free):
                    return

    def fetch(self, nbytes: int) -> torch.UntypedStorage:
        """Return new memory on the device, after making room for it, and count it."""
        self.make_room(nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.live_bytes.device)
        self.live_bytes.add([memory])
        self.fetched += nbytes
        return memory.untyped_storage()

    # -- what autograd saves -----------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> SavedTensor:
        block, storage = None, tensor.untyped_storage() if is_plain(tensor) else None
        if storage is not None and storage in self.live_bytes:  # allocated in this call
            block = self._block_of.get(storage._cdata)
            if block is None or block.host is not None:  # the block of an offloaded storage whose address was reused
                block = SavedBlock(self.fetch, storage.nbytes())
                self._block_of[storage._cdata] = self._blocks[next(self._ages)] = block
        return SavedTensor(tensor, block)

    # -- the backward ------------------------------------------------------------------------------------

    def _watch_node(self, node: torch.autograd.graph.Node, given: set[Any]) -> None:
        """Register hooks that make room for the results of a node of the backward, and count them."""
        counted = [f is not None and f not in given and not _of_parameter(f) for f, _ in node.next_functions]
        coming = 0
        for (function, index), one in zip(node.next_functions, counted, strict=True):
            if one:
                assert function is not None
                metadata: Any = function._input_metadata[index]
                coming += prod(metadata.shape) * metadata.dtype.itemsize

        def before(grads: Sequence[Any]) -> None:
            self.live_bytes.add(grads)
            self._reserved = 0
            self.make_room(coming)
            self._reserved = coming

        def after(made: Sequence[Any], _: Sequence[Any]) -> None:
            self._reserved = 0
            self.live_bytes.add([grad for grad, one in zip(made, counted, strict=False) if one])

        node.register_prehook(before)
        node.register_hook(after)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes room before each op, and counts what it allocated."""

    def __init__(self, offload: OnDemandOffload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._offload = offload

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        coming = _bytes_of_results(func, args, kwargs)
        if coming:
            self._offload.make_room(coming)
        result = func(*args, **kwargs)
        if _makes(func):
            self._offload.live_bytes.add(pytree.tree_leaves(result))
        return result


def _makes(func: Any) -> bool:
    """Return whether a result of `func` is new, and no view of an argument."""
    returns = func._schema.returns
    return any(r.alias_info is None for r in returns)


def _bytes_of_results(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the bytes that an op will allocate, from its results on the meta device; 0 if that is unknown."""
    if not _makes(func) or kwargs.get("generator") is not None:
        return 0

    def meta(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    try:
        args, kwargs = pytree.tree_map(meta, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        results = pytree.tree_leaves(func(*args, **kwargs))
    except Exception:  # no meta kernel, or the size of the result depends on data: it is counted after the op
        return 0
    return sum(r.untyped_storage().nbytes() for r in results if isinstance(r, torch.Tensor))


def _nodes(tensors: Sequence[torch.Tensor], given: set[Any]) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes of the backward from `tensors` to the leaves and to the nodes `given`."""
    stack: list[Any] = [t.grad_fn for t in tensors]
    seen = {None, *given}
    while stack:
        node = stack.pop()
        if node in seen or _of_parameter(node):
            continue
        seen.add(node)
        yield node
        stack += [function for function, _ in node.next_functions]


def _accumulates(node: Any) -> bool:
    return "AccumulateGrad" in node.name()


def _of_parameter(node: Any) -> bool:
    """Return whether the gradient that a node takes becomes the gradient of a leaf, perhaps as a view."""
    while not _accumulates(node):
        following = [function for function, _ in node.next_functions if function is not None]
        if len(following) != 1 or not node.name().startswith(_VIEWS):
            return False
        (node,) = following
    return True
