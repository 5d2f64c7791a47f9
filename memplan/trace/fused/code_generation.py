"""Split a joint graph into forward and backward as Inductor does, and have Inductor generate code for both.

Only the code is used, and the kernels in it: memplan calls them in its own order, at its own addresses.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import compiled_autograd
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.virtualized import V

from memplan.errors import UnsupportedGraph
from memplan.trace.fused.kernel_runs import Block, BlockView, KernelRun, Replay, extent, piece_of
from memplan.trace.fused.wrapper import recording, refused
from memplan.trace.fused.written import WrittenCode
from memplan.trace.passes.rewrite import fake_mode_of

# What a user may have set and the recorded code cannot have. Inductor's cache of whole graphs is off, because what
# comes out of it was not written by a wrapper; its caches of compiled kernels, which take the time, are on.
_SETTINGS: dict[str, Any] = {
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "freezing": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "graph_partition": False,
    "memory_planning": False,
    "profile_bandwidth": False,
    "triton.cudagraphs": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The code of the forward or the backward, replayed. `inputs` and `outputs` are in the order of its graph.

    An output is a piece, or a plain value. `constants` are the blocks of tensors that the code holds.
    """

    code: WrittenCode
    runs: tuple[KernelRun, ...]
    inputs: tuple[BlockView | None, ...]
    outputs: tuple[Any, ...]
    constants: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Both halves of a step; without a backward, `backward` is None.

    `given` are the pieces of the joint graph's inputs, by the names of their placeholders. Of the forward's outputs,
    the first `returned` are the step's own, and the others are saved for the backward.
    """

    forward: Half
    backward: Half | None
    given: dict[str, BlockView]
    returned: int


def generate(joint: fx.GraphModule, *, returned: int, static: Sequence[int], training: bool) -> Halves:
    """Return the code of a joint graph, which is changed.

    `returned`: the number of outputs of the forward. `static`: the inputs, by position, that stay from step to step.
    Raises `UnsupportedGraph` for code that memplan cannot plan.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    mode = fake_mode_of(joint.graph)
    given = {n.name: _given(n) for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)}
    with _compiling(mode):
        if not training:
            forward = _forward(joint, given, returned, inference=True)
            return Halves(forward=forward, backward=None, given=given, returned=returned)
        values = [n.meta.get("val") for n in placeholders]
        primals = [v for n, v in zip(placeholders, values, strict=True) if not _is_tangent(n)]
        tangents = [v for n, v in zip(placeholders, values, strict=True) if _is_tangent(n)]
        first, second = compile_fx.partition_fn(
            joint, (primals, tangents), num_fwd_outputs=returned, static_lifetime_input_indices=list(static)
        )
        saved = _names_of_outputs(first)[returned:]
        names = [n.name for n in second.graph.find_nodes(op="placeholder")]
        forward = _forward(first, given, returned, inference=False)
        pairs = zip(saved, forward.outputs[returned:], strict=True)
        found = {name: piece for name, piece in pairs if name is not None}
        backward = _backward(second, names, {**given, **found})
    return Halves(forward=forward, backward=backward, given=given, returned=returned)


def _forward(graph: fx.GraphModule, given: dict[str, BlockView], returned: int, *, inference: bool) -> Half:
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    values = _values_of(graph)
    extra = compile_fx.create_compiler_config_extra(graph)
    with _recorded(values) as (code, inner):
        compile_fx.compile_fx_forward(
            graph,
            values,
            num_orig_model_outputs=returned,
            num_example_inputs=len(values),
            compiler_config_extra=extra,
            inner_compile=inner,
            is_inference=inference,
        )
    return _half(code, [given.get(name) for name in names], label="")


def _backward(graph: fx.GraphModule, names: Sequence[str], known: dict[str, Any]) -> Half:
    """Generate the backward for the strides that the saved tensors have in the generated forward."""
    values = _values_of(graph)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        piece = known.get(name)
        if isinstance(value, torch.Tensor) and isinstance(piece, BlockView) and value.stride() != piece.strides:
            values[i] = value.as_strided(value.size(), piece.strides)
    extra = compile_fx.create_compiler_config_extra(graph)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        graph = copy.deepcopy(graph)
    with _recorded(values) as (code, inner):
        compile_fx.compile_fx_backward(graph, values, compiler_config_extra=extra, inner_compile=inner)
    return _half(code, [known.get(name) for name in names], label="backward_")


def _half(code: WrittenCode, inputs: Sequence[Any], label: str) -> Half:
    pieces = [piece if isinstance(piece, BlockView) else None for piece in inputs]
    named = {name: piece for name, piece in zip(code.inputs, pieces, strict=True) if piece is not None}
    replay = Replay(code, named, label)
    runs = replay.run()
    return Half(
        code=code,
        runs=runs,
        inputs=tuple(pieces),
        outputs=replay.outputs(),
        constants=tuple(replay.constants.values()),
    )


@contextlib.contextmanager
def _recorded(values: Sequence[Any]) -> Iterator[tuple[WrittenCode, Any]]:
    """Record the code of the one graph that is compiled inside by the second result, an `inner_compile`."""
    devices = {str(v.device) for v in values if isinstance(v, torch.Tensor)}
    if devices - {"cpu"}:
        raise refused(f"tensors on {', '.join(sorted(devices))}")
    with recording("cpu") as code:

        def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            """Compile one graph, and keep the globals of its code."""
            made = compile_fx.compile_fx_inner(graph, inputs, **options)
            run = getattr(made, "current_callable", None)
            if run is None or not hasattr(run, "__globals__"):
                raise refused("no function of its own (a graph without ops)")
            code.namespace = run.__globals__
            return made

        yield code, inner


@contextlib.contextmanager
def _compiling(mode: Any) -> Iterator[None]:
    """The contexts in which AOTAutograd calls Inductor."""
    with (
        config.patch(_SETTINGS),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        compiled_autograd._disable(),
    ):
        yield


def _given(node: fx.Node) -> BlockView:
    """Return the piece of an input of the step."""
    tensor = node.meta["val"]
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        what = f"a tensor that is not plain strided memory ({tensor.layout})"
        raise UnsupportedGraph(node.name, what, "use dense real tensors", see="strided")
    piece = piece_of(Block(name=node.name, device=tensor.device, nbytes=0, given=True), tensor)
    piece.block.nbytes = extent(piece)  # a fake storage may be larger
    return piece


def _is_tangent(node: fx.Node) -> bool:
    return bool(node.meta["desc"].is_tangent())


def _names_of_outputs(graph: fx.GraphModule) -> list[str | None]:
    (output,) = graph.graph.find_nodes(op="output")
    return [getattr(node, "name", None) for node in output.args[0]]


def _values_of(graph: fx.GraphModule) -> list[Any]:
    """Return the fake values of a graph's inputs."""
    return [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
