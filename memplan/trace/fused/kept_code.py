"""Keeps the code that was recorded of a graph beside Inductor's own cache of graphs, for other processes.

Inductor's cache of whole graphs holds what runs, and not what memplan reads while code is written. So the record itself
is kept, under Inductor's key of the graph and all that memplan adds to it. It is on where Inductor's cache is, in the
same folder, and trusted alike.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.codecache import BypassFxGraphCache, PyCodeCache, compiled_fx_graph_hash
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._ops import OpOverload

from memplan.core.files import write_atomic
from memplan.errors import UnreadableFile
from memplan.torch_inside import versions
from memplan.torch_inside.versions import require_cacheable
from memplan.trace.capture.origins import origin_of
from memplan.trace.fused.kernel_runs import WrittenCode
from memplan.version import __version__


def key_of(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    settings: dict[str, Any],
    *,
    in_blocks: bool = False,
) -> str | None:
    """Return the key of the code of a graph; None where Inductor would not keep it either.

    Args:
        graph: The graph that Inductor is given.
        inputs: Its example inputs.
        settings: The other arguments of `compile_fx_inner`.
        in_blocks: The graph was divided by rows.

    Example:
        >>> keep(key_of(graph, inputs, settings), code)
    """
    if not config.fx_graph_cache or config.force_disable_caches:
        return None
    given: Any = settings
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    for tensor in tensors:  # Inductor marks those that it has compiled code for, and hashes them otherwise from then on
        vars(tensor).pop("_is_inductor_static", None)
    try:
        require_cacheable(graph, inputs, given)
        found, _ = compiled_fx_graph_hash(graph, inputs, given, ())
    except BypassFxGraphCache:
        return None
    origins = [origin_of(node) for node in graph.graph.nodes]
    offsets = [tensor.storage_offset() for tensor in tensors]  # of which the hash has none
    said = (__version__, _recorder(), torch.__version__, found, in_blocks, origins, offsets)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def known_code(key: str | None) -> WrittenCode | None:
    """Return the code that is kept under a key, with its kernels; None if there is none that can be read."""
    if key is None:
        return None
    try:
        code, source = pickle.loads(_path(key).read_bytes())
        code.namespace = PyCodeCache.load(source).__dict__
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError, TypeError):
        return None
    return code if isinstance(code, WrittenCode) else None


def keep(key: str | None, code: WrittenCode) -> None:
    """Keep recorded code under a key, unless it holds tensors or cannot be written."""
    if key is None or any(isinstance(thing, torch.Tensor) for thing in code.namespace.values()):
        return
    file = code.namespace.get("__file__")
    if not isinstance(file, str):
        return
    plain = WrittenCode(**{f.name: getattr(code, f.name) for f in fields(code) if f.name != "namespace"})
    stream = io.BytesIO()
    path = _path(key)
    with contextlib.suppress(OSError, UnreadableFile):
        _Pickler(stream).dump((plain, Path(file).read_text(encoding="utf-8")))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, stream.getvalue())


@functools.cache
def _recorder() -> str:
    """Return a digest of the code that records code: what another state of it has recorded is not read."""
    digest = hashlib.sha256()
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(versions.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return Path(cache_dir()) / "memplan" / key[:2] / key


class _Pickler(pickle.Pickler):
    """Writes ops by their names."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how to make `thing` again."""
        if isinstance(thing, OpOverload):
            return _op, (str(thing),)
        return NotImplemented


def _op(name: str) -> OpOverload:
    """Return an op by its name: "aten.mm.default"."""
    namespace, packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found
