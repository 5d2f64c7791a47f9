"""Trace recurrent layers as eager computes them on a CPU.

An LSTM is one oneDNN kernel for each layer and direction, and one for its backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from memplan.errors import UnsupportedGraph
from memplan.trace.passes.nodes import is_fixed
from memplan.trace.passes.rewrite import aten, correct_results, fake_mode_of, value

_LSTM = 2  # oneDNN's number (ideep's rnn_kind)
_WORKSPACE = 3  # position among the results of `mkldnn_rnn_layer`
_LAYERS = {getattr(torch, name): getattr(aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


class RecurrentAsEager(TorchFunctionMode):
    """Trace recurrent layers as the ops that eager's C++ calls for them on a CPU.

    Torch has decompositions for them in Python. These use other ops in another order, lose the dropout between layers,
    and under autocast return types that differ from eager's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._onednn = torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = _LAYERS.get(func)
        if op is None or len(args) != len(op._schema.arguments) or not isinstance(args[3], bool):
            return func(*args, **(kwargs or {}))  # such as a call on packed sequences
        x, state, weights = args[:3]
        if x.device.type != "cpu":
            return func(*args, **(kwargs or {}))
        if func is torch.lstm and self._onednn and _runs_by_onednn(x, *state, *weights):
            return _onednn_lstm(*args)
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def _onednn_lstm(  # noqa: PLR0917  (the op's own signature)
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `aten.lstm.input` as eager does where oneDNN supports it (`lstm_mkldnn` in native/mkldnn/RNN.cpp)."""
    hidden, cell = (s.contiguous() for s in state)  # the kernel reads them as if they were, whatever their strides
    size, directions, ends = hidden.size(2), 2 if bidirectional else 1, []
    given = _by_direction(weights, has_biases)
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(layers):
        x = x.contiguous()
        outs = []
        for reverse in (False, True)[:directions]:
            index = layer * directions + reverse
            out, *end, _ = aten.mkldnn_rnn_layer.default(
                *(x, *next(given), hidden[index], cell[index], reverse, [], _LSTM, size, layers),
                *(has_biases, bidirectional, batch_first, train),
            )
            outs.append(out)
            ends.append(end)
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])


def size_workspaces(graph: fx.Graph) -> None:
    """Set the sizes of the workspaces that the kernels save for their backward, in place: their fakes have zero bytes.

    Only oneDNN knows the size, so the kernel runs once for each distinct shape, on zeros. A workspace that no backward
    reads is skipped.
    """
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        items = [u for u in node.users if u.target is operator.getitem and u.args[1] == _WORKSPACE]
        if not any(item.users for item in items):
            continue
        x, weight, recurrent = (value(n) for n in node.args[:3])
        shapes = tuple(x.shape), tuple(weight.shape), tuple(recurrent.shape)
        if not all(map(is_fixed, (x, weight, recurrent))):
            reason = "has an LSTM, whose workspace oneDNN sizes for one shape, and dimensions that vary"
            raise UnsupportedGraph(
                "the model", reason, "leave out dynamic_shapes and compile for each shape", see="lstm-shapes"
            )
        nbytes = workspace_bytes(*shapes, x.dtype, tuple(node.args[7:]))
        with fake_mode_of(graph):
            workspace = torch.empty(nbytes, dtype=torch.uint8)
        correct_results(node, (*value(node)[:_WORKSPACE], workspace))


@lru_cache(maxsize=256)
def workspace_bytes(
    x: tuple[int, ...], weight: tuple[int, ...], recurrent: tuple[int, ...], dtype: torch.dtype, how: tuple[Any, ...]
) -> int:
    """Return the size of the workspace in bytes, by running the kernel on zeros.

    `how`: the arguments of the op that follow the tensors.
    """
    shapes = x, weight, recurrent, weight[:1], weight[:1], (x[1], recurrent[1]), (x[1], recurrent[1])
    # As at run time: the workspace exists only with gradients, and autocast would make it half precision.
    with _disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        given = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        with torch._C._AutoDispatchBelowAutograd():
            return int(aten.mkldnn_rnn_layer.default(*given, *how)[_WORKSPACE].numel())


def _runs_by_onednn(*tensors: torch.Tensor) -> bool:
    """Return whether oneDNN runs eager's LSTM: `use_mkldnn` in native/RNN.cpp, which checks the type of the first
    tensor.
    """
    x, hidden, cell = tensors[:3]
    if not x.numel() or hidden.size(2) != cell.size(2):  # projections
        return False
    takes = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: not torch.is_grad_enabled() and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return takes.get(x.dtype, False) and all(t.device.type == "cpu" for t in tensors)


def _by_direction(weights: Sequence[torch.Tensor], has_biases: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield two matrices and two biases for each layer and direction."""
    each = 4 if has_biases else 2
    for i in range(0, len(weights), each):
        own = tuple(weights[i : i + each])
        yield own if has_biases else (*own, *(w.new_zeros(w.size(0)) for w in own))  # no kernel reads those


def require_modules_dropout_kept(model: nn.Module) -> None:
    """Raise `UnsupportedGraph` for dropout between layers, which tracing loses on devices other than the CPU."""
    for module in model.modules():
        if not isinstance(module, nn.RNNBase) or all(p.device.type == "cpu" for p in module.parameters()):
            continue
        if module.dropout and module.training and module.num_layers > 1:
            reason = "has dropout between its layers, which tracing loses for other devices than a CPU"
            hint = "use dropout=0 there and nn.Dropout between single-layer modules"
            raise UnsupportedGraph(type(module).__name__, reason, hint, see="dropout-between-layers")
