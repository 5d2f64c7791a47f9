"""The operators and modules of PyTorch's test databases, and their samples."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.parameter import is_lazy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
# The largest, the last, and one of 0 or 1 elements.
SAMPLES = ("largest", "last", "small")
# Samples are small, and this many of an operator's are looked at: max_pool2d has 1,440.
_MOST = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call: what makes the callable (an operator's is always the same), and its arguments.

    `derivable` makes of the result what has a derivative: eigenvectors have one only without their phase.
    """

    make: Callable[[], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    derivable: Callable[[Any], Any] = lambda result: result

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    @property
    def elements(self) -> int:
        """How many elements the tensors have, together."""
        return sum(x.numel() for x in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An operator, or a module in one mode. `dtypes`: those of `DTYPES` that it takes."""

    name: str
    dtypes: tuple[str, ...]
    read: Callable[[torch.dtype], Iterator[Sample]]

    def samples(self, dtype: str, seed: int) -> Iterator[Sample]:
        """Its samples, with values that depend on the seed alone."""
        seed_everything(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _, sample in zip(range(_MOST), self.read(DTYPES[dtype]), strict=False):
                yield sample

    def sample(self, dtype: str, index: int, seed: int) -> Sample:
        """The sample at `index`, counted from the first. Raises `KeyError` where there is none."""
        return _samples_at(self, dtype, seed, frozenset(self.chosen(dtype).values()) | {index})[index]

    @lru_cache(maxsize=8)  # noqa: B019  # entries are few, and live as long as the process
    def chosen(self, dtype: str) -> dict[str, int]:
        """The positions of the largest sample, of the last, and of the first with 0 elements or else with 1.

        A sample that is two of these has the first name.
        """
        sizes = [(i, s.elements) for i, s in enumerate(self.samples(dtype, 0))]
        if not sizes:
            return {}
        found = {"largest": max(sizes, key=lambda s: (s[1], -s[0]))[0], "last": sizes[-1][0]}
        small = [s for s in sizes if s[1] <= 1]
        if small:
            found["small"] = min(small, key=lambda s: (s[1], s[0]))[0]
        first = {i: name for name, i in reversed(found.items())}
        return {name: i for name, i in found.items() if first[i] == name}


@lru_cache(maxsize=16)
def _samples_at(entry: Entry, dtype: str, seed: int, positions: frozenset[int]) -> dict[int, Sample]:
    """The samples at these positions, those of one entry found in one pass."""
    last = max(positions)
    return {i: s for i, s in zip(range(last + 1), entry.samples(dtype, seed), strict=False) if i in positions}


def seed_everything(seed: int) -> None:
    """Seed the random numbers of torch, numpy and Python: samples draw from all of them."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@cache
def entries() -> dict[str, Entry]:
    """All entries by name, in the order of their names."""
    from torch.testing._internal import common_methods_invocations, common_modules

    # Random operators are wrapped so that each call seeds the generator. Here each contender is seeded before its call.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found = [_operator(info) for info in common_methods_invocations.op_db]
    for info in common_modules.module_db:
        modes = (True, False) if info.train_and_eval_differ else (True,)
        found += [_module(info, training) for training in modes]
    named = {e.name: e for e in sorted(found, key=lambda e: e.name)}
    assert len(named) == len(found), "two entries have one name"
    return named


def _operator(info: Any) -> Entry:
    name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
    dtypes = tuple(n for n, d in DTYPES.items() if d in info.dtypes)
    return Entry(name=name, dtypes=dtypes, read=partial(_operator_samples, info))


def _operator_samples(info: Any, dtype: torch.dtype) -> Iterator[Sample]:
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    for s in info.sample_inputs("cpu", dtype, requires_grad=grad):
        yield Sample(
            make=lambda: info.op, args=(s.input, *s.args), kwargs=dict(s.kwargs), derivable=s.output_process_fn_grad
        )


def _module(info: Any, training: bool) -> Entry:
    name = info.name + ("" if training else "(eval)")
    dtypes = tuple(n for n, d in DTYPES.items() if d in info.dtypes)
    return Entry(name=name, dtypes=dtypes, read=partial(_module_samples, info, training))


def _module_samples(info: Any, training: bool, dtype: torch.dtype) -> Iterator[Sample]:
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for s in inputs:
        if s.forward_input is not None:
            make = partial(_build, info.module_cls, s, dtype, training)
            yield Sample(make=make, args=tuple(s.forward_input.args), kwargs=dict(s.forward_input.kwargs))


def _build(kind: type[nn.Module], given: Any, dtype: torch.dtype, training: bool) -> nn.Module:
    """A module with parameters that are always the same; a lazy one has seen its input, as memplan asks for."""
    seed_everything(1)
    constructor = given.constructor_input
    module = kind(*constructor.args, **constructor.kwargs).to("cpu", dtype).train(training)
    if any(map(is_lazy, module.parameters())):
        module(*given.forward_input.args, **given.forward_input.kwargs)
    return module
