"""The code that Inductor's wrapper writes for one graph, line by line, with what its line objects say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from memplan.core.graph import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The layout of one of Inductor's buffers. `nbytes` are those of its whole allocation."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Allocates the buffer `name`."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """Gives a buffer's bytes, or a view of them, another name: its `text` assigns it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """Calls a kernel.

    `text` is the source of the call. `kernel` is the name of a kernel that Inductor generated, "" for another one.
    `written` are the positions and names of the arguments that the kernel writes, and `changed` the buffers among the
    others that it changes. `known`: these two are complete; otherwise, any argument may be changed. `overload` is the
    op that is called, where its results are new tensors.
    """

    text: str
    kernel: str = ""
    written: frozenset[int | str] = frozenset()
    changed: frozenset[str] = frozenset()
    known: bool = True
    overload: OpOverload | None = None
    origin: Origin = field(default_factory=Origin)


WrittenLine = Allocation | Renaming | KernelLine


@dataclass(slots=True, kw_only=True)
class WrittenCode:
    """The code of one graph. `inputs` are the names of its arguments, `outputs` the sources of what it returns.

    `specs` are the layouts of its buffers by name, and `sources` the source code of its generated kernels by name.
    `nodes` are the nodes of the graph that its buffers hold, by name. `overwritable` are the buffers, by the name of a
    result, whose bytes it may take where nothing reads them afterwards. `namespace` are the globals of the loaded code.
    """

    lines: list[WrittenLine] = field(default_factory=list)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    overwritable: dict[str, tuple[str, ...]] = field(default_factory=dict)
    namespace: Mapping[str, Any] = field(default_factory=dict)
