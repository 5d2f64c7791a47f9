"""Split a joint graph into forward and backward as Inductor does, and have Inductor generate code for both.

Only the code is used, and the kernels in it: memplan calls them in its own order, at its own addresses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import count_calls
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.virtualized import V

from memplan.devices.kinds import HOST, is_accelerator
from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import BufferAOTInput, ParamAOTInput
from memplan.torch_inside.versions import compiler_config, loaded_code, partition
from memplan.trace.fused.aligned_products import align_products
from memplan.trace.fused.early_gradients import EARLY
from memplan.trace.fused.environment import inductors_errors, refused
from memplan.trace.fused.kept_code import keep, key_of, known_code
from memplan.trace.fused.kernel_runs import (
    Block,
    BlockView,
    KernelRun,
    RandomState,
    Replay,
    WrittenCode,
    extent,
    piece_of,
)
from memplan.trace.fused.sums import with_sums_in_place
from memplan.trace.fused.wrapper import recording
from memplan.trace.passes.partitions import made_in_the_forward, require_new_values, save_old_values
from memplan.trace.passes.rewrite import fake_mode_of, storage_key

# What a user may have set and the recorded code cannot have.
_SETTINGS: dict[str, Any] = {
    "allow_buffer_reuse": False,  # memplan decides which bytes each buffer has
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "freezing": False,
    "graph_partition": False,
    "layout_optimization": False,  # layouts of its choice take copies of weights
    "inplace_buffers": False,  # what is written over can't be made again: the plan decides what lies over what
    "memory_planning": False,
    "profile_bandwidth": False,
    "comprehensive_padding": False,  # rows of a result and of what may lie over it have to stay alike
    "shape_padding": False,  # `align_products` pads what is worth it, without copies
    "triton.cooperative_reductions": False,  # their kernels have workspaces
    "triton.cudagraphs": False,
    "triton.mix_order_reduction": False,  # its kernels have workspaces
}

# Inductor's cache of whole graphs is off, because what comes out of it was not written by a wrapper: `kept_code.py`
# keeps what was. The caches of compiled kernels are on.
_WRITTEN_HERE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The code of the forward or the backward, replayed.

    `runs` are its calls of kernels in order. `outputs` are in the order of its graph: each is a view of a block, or a
    plain value. `constants` are the blocks of tensors that the code holds.
    """

    runs: tuple[KernelRun, ...]
    outputs: tuple[Any, ...]
    constants: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Both halves of a step; without a backward, `backward` is None.

    `given` are the blocks of the joint graph's inputs, as they are viewed, by the names of their placeholders. Of the
    forward's outputs, the first `returned` are the step's own, and the others are saved for the backward.
    """

    forward: Half
    backward: Half | None
    given: dict[str, BlockView]
    returned: int


def generate(
    joint: fx.GraphModule,
    model: str,
    *,
    returned: int,
    training: bool,
    in_blocks: bool,
) -> Halves:
    """Return the code of a joint graph, which is changed.

    Args:
        joint: The graph, whose changed inputs are written back at the end of the forward.
        model: The name of the model, for errors.
        returned: The number of outputs of the forward.
        training: The graph contains a backward.
        in_blocks: It was divided by rows: no kernel may compute parts of two blocks.

    Raises:
        UnsupportedGraph: Inductor cannot compile the graph, or memplan cannot plan the code.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    given = _given(placeholders)
    on_device = is_accelerator(torch.device(_device_of([node.meta.get("val") for node in placeholders])))
    aligns = on_device and config.shape_padding
    with _compiling(fake_mode_of(joint.graph), _SETTINGS):
        if not training:
            forward = _forward(joint, model, given, returned, in_blocks, inference=True)
            return Halves(forward=forward, backward=None, given=given, returned=returned)
        first, second = _partition(joint, model, returned, aligns=aligns)
        return _both((first, second), model, given, returned, in_blocks=in_blocks)


def generate_partition(joint: fx.Graph, forward: fx.GraphModule, backward: fx.GraphModule, returned: int) -> Halves:
    """Return the code of a partition of a joint graph, as Inductor generates it by itself; both halves are changed.

    `returned`: the number of outputs of the forward. Raises what `generate` raises.
    """
    given = _given(joint.find_nodes(op="placeholder"))
    does = ("allow_buffer_reuse", "comprehensive_padding", "inplace_buffers", "shape_padding", "layout_optimization")
    settings = {name: value for name, value in _SETTINGS.items() if name not in does}
    with _compiling(fake_mode_of(joint), settings):
        return _both((forward, backward), "the graph", given, returned)


def _both(
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    model: str,
    given: dict[str, BlockView],
    returned: int,
    *,
    in_blocks: bool = False,
) -> Halves:
    """Generate a forward and its backward."""
    first, second = graphs
    saved = [getattr(node, "name", None) for node in _outputs_of(first)[returned:]]
    forward = _forward(first, model, given, returned, in_blocks, inference=False)
    pairs = zip(saved, forward.outputs[returned:], strict=True)
    found = {name: view for name, view in pairs if name is not None and isinstance(view, (BlockView, RandomState))}
    for name, view in found.items():
        if isinstance(view, BlockView):
            view.block.node = name
    backward = _backward(second, model, {**given, **found}, in_blocks)
    return Halves(forward=forward, backward=backward, given=given, returned=returned)


def _partition(
    joint: fx.GraphModule, model: str, returned: int, *, aligns: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graphs of forward and backward.

    They are partitioned as by Inductor, but for what is read too late. `aligns`: matrix products are
    padded before.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [n.meta.get("val") for n in placeholders if not n.meta["desc"].is_tangent()]
    tangents = [n.meta.get("val") for n in placeholders if n.meta["desc"].is_tangent()]

    static = [i for i, n in enumerate(placeholders) if isinstance(n.meta["desc"], (ParamAOTInput, BufferAOTInput))]
    users = config.custom_partitioner_fn

    def keeping_old_values(gm: fx.GraphModule, inputs: Sequence[object], **options: Any) -> Any:
        """Partition a graph, on which Inductor's own passes have run, so that no value is read that has changed."""
        own = users or min_cut_rematerialization_partition
        if aligns:
            align_products(gm.graph)
        save_old_values(gm.graph)
        early = [node for node in gm.graph.nodes if EARLY in node.meta]
        return made_in_the_forward(gm, early, functools.partial(own, gm, inputs, compiler="inductor"), **options)

    with inductors_errors(model):
        first, second = partition(
            joint,
            (primals, tangents),
            keeping_old_values,
            num_fwd_outputs=returned,
            static_lifetime_input_indices=static,
        )
    require_new_values(joint.graph, first.graph, second.graph)
    _require_drawn_once(first.graph, second.graph)
    return first, second


def _require_drawn_once(forward: fx.Graph, backward: fx.Graph) -> None:
    """Raise `UnsupportedGraph` if the backward draws random numbers that the forward has drawn."""
    names = {node.name for node in forward.nodes}
    for node in backward.nodes:
        if node.name in names and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise refused(f"a partition that draws {node.name} twice")


def _forward(
    graph: fx.GraphModule,
    model: str,
    given: Mapping[str, BlockView],
    returned: int,
    in_blocks: bool,
    *,
    inference: bool,
) -> Half:
    """Generate the forward."""
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    values = _values_of(graph)
    with inductors_errors(model), _recorded(values, in_blocks) as (code, inner):
        compile_fx.compile_fx_forward(
            graph,
            values,
            num_orig_model_outputs=returned,
            num_example_inputs=len(values),
            compiler_config_extra=compiler_config(graph),
            inner_compile=inner,
            is_inference=inference,
        )
    return _half(code, [given.get(name) for name in names], label="")


def _backward(
    graph: fx.GraphModule,
    model: str,
    known: Mapping[str, BlockView | RandomState],
    in_blocks: bool,
) -> Half:
    """Generate the backward for the strides that the saved tensors have in the generated forward."""
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    values = _values_of(graph)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        view = known.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(view, BlockView):
            continue
        given = view.offset if is_accelerator(value.device) else value.storage_offset()  # what it tells of alignment
        if (value.stride(), value.storage_offset()) != (view.strides, given):
            values[i] = value.as_strided(value.size(), view.strides, given)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        graph = copy.deepcopy(graph)
    placed = [v for name, v in zip(names, values, strict=True) if not isinstance(known.get(name), RandomState)]
    with inductors_errors(model), _recorded(placed, in_blocks) as (code, inner):
        extra = compiler_config(graph)
        compile_fx.compile_fx_backward(graph, values, compiler_config_extra=extra, inner_compile=inner)
    return _half(code, [known.get(name) for name in names], label="backward_")


def _half(code: WrittenCode, inputs: Sequence[BlockView | RandomState | None], label: str) -> Half:
    """Replay the code of a graph that is given `inputs` (None: no tensor)."""
    views = {name: view for name, view in zip(code.inputs, inputs, strict=True) if view is not None}
    replay = Replay(code, views, label)
    blocks = {view.block for view in views.values() if isinstance(view, BlockView)}
    runs, outputs = with_sums_in_place(replay.run(), replay.outputs(), blocks)
    return Half(runs=runs, outputs=outputs, constants=tuple(replay.constants.values()))


@contextlib.contextmanager
def _recorded(values: Sequence[Any], in_blocks: bool) -> Iterator[tuple[WrittenCode, Any]]:
    """Record the code of the one graph that is compiled inside by the second result, an `inner_compile`."""
    with recording(_device_of(values), in_blocks=in_blocks) as code:

        def inner(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
            """Compile one graph, and keep the globals of its code. Inductor writes none for a graph without ops."""
            if not count_calls(graph.graph):
                code.inputs = tuple(n.name for n in graph.graph.find_nodes(op="placeholder"))
                code.outputs = tuple(map(str, _outputs_of(graph)))
                return graph.forward
            key = key_of(graph, inputs, settings, in_blocks=in_blocks)
            known = known_code(key)
            if known is not None:
                for field in fields(known):
                    setattr(code, field.name, getattr(known, field.name))
                return graph.forward
            with config.patch(_WRITTEN_HERE):
                made = compile_fx.compile_fx_inner(graph, inputs, **settings)
            module = loaded_code(made)
            if module is None:
                raise refused("no module of its own")
            if len(code.inputs) != len(inputs):  # another device's wrapper has written it
                raise refused("kernels for another device than that of its inputs")
            code.namespace = module.__dict__
            keep(key, code)
            return made

        yield code, inner


def _device_of(values: Sequence[Any]) -> str:
    """Return the kind of the device where all these tensors are."""
    found = sorted({str(v.device) for v in values if isinstance(v, torch.Tensor)})
    if len(found) > 1:
        raise refused(f"tensors on {', '.join(found)}")
    return torch.device(found[0]).type if found else HOST


@contextlib.contextmanager
def _compiling(mode: Any, settings: dict[str, Any]) -> Iterator[None]:
    """The contexts in which AOTAutograd calls Inductor, with these settings of it."""
    with (
        config.patch(settings),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        compiled_autograd._disable(),
    ):
        yield


def _given(placeholders: Sequence[fx.Node]) -> dict[str, BlockView]:
    """Return views of the blocks that the step is given, by the names of its inputs; tied weights are one block."""
    found: dict[str, BlockView] = {}
    blocks: dict[int, Block] = {}
    for node in placeholders:
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            what = f"a tensor that is not plain strided memory ({tensor.layout})"
            raise UnsupportedGraph(node.name, what, "use dense real tensors", see="strided")
        new = Block(name=node.name, device=tensor.device, nbytes=0, given=True)
        view = piece_of(blocks.setdefault(storage_key(tensor), new), tensor)
        view.block.nbytes = max(view.block.nbytes, extent(view))  # a fake storage may be larger
        found[node.name] = view
    return found


def _outputs_of(graph: fx.GraphModule) -> Sequence[Any]:
    """Return the outputs of a graph: nodes and plain values."""
    (output,) = graph.graph.find_nodes(op="output")
    found: Sequence[Any] = output.args[0]
    return found


def _values_of(graph: fx.GraphModule) -> list[Any]:
    """Return the fake values of a graph's inputs."""
    return [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
