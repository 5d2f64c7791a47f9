"""Refuse ops that may return before their results have arrived: collectives, and ops on another stream.

Their `wait` is registered with the storage that torch allocated for the result. A result in the arena would be a copy
of bytes that have not arrived, and the wait for it would wait for nothing.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from memplan.errors import UnsupportedGraph
from memplan.trace.capture.origins import place_of

_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_STREAMS = {"ao", "streams"}  # activation offloading, and the streams and events of torch.compile


def refuse_unfinished(graph: fx.Graph) -> None:
    """Raise `UnsupportedGraph` for the first op that may return before its results have arrived."""
    for node in graph.nodes:
        overloads = [target for target in (node.target, *node.args) if isinstance(target, OpOverload)]
        for overload in overloads:  # a higher-order op has it among its arguments
            if overload.namespace in _COLLECTIVES:
                what = f"a collective ({overload}), whose result arrives later: memplan cannot plan it yet"
                hint = (
                    "compile a model of parallelize_module or fully_shard by memplan.compile or compile_step, which "
                    "plan its collectives; keep others outside of what is planned: call them in a function under "
                    "@torch.compiler.disable that waits for the result (wait_tensor), and use "
                    'torch.compile(model, backend="memplan")'
                )
                raise UnsupportedGraph(place_of(node), what, hint, see="collectives")
            if overload.namespace in _STREAMS:
                what = f"an op on another stream ({overload}), whose result arrives later: memplan cannot plan it"
                hint = "leave streams and offloading to memplan: pass budget= to move activations to the host"
                raise UnsupportedGraph(place_of(node), what, hint, see="collectives")
