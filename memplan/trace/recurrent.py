"""LSTMs as eager computes them on a CPU: by one oneDNN kernel for each layer and direction, and one for its backward.

PyTorch's own decomposition, which tracing would meet, takes those kernels in inference only; with gradients it has a
few operations for each step of the sequence, and it loses the dropout between layers.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from memplan.errors import UnsupportedGraph
from memplan.trace.rewrite import aten, correct_results, fake_mode_of, value

_LSTM = 2  # oneDNN's number (ideep's rnn_kind)
_WORKSPACE = 3  # position among the results of `mkldnn_rnn_layer`


def call_onednn(module: fx.GraphModule) -> None:
    """Have every LSTM of a module that `torch.export` made computed as eager would."""
    nodes = [node for node in module.graph.nodes if node.target is aten.lstm.input]
    for node in nodes:
        node.target = lstm
    if nodes:
        module.recompile()


def require_dropout_kept(model: nn.Module) -> None:
    """Raise `UnsupportedGraph` for recurrent layers whose dropout tracing would lose."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.training and module.num_layers > 1:
            weights = list(module.parameters(recurse=False))
            if not isinstance(module, nn.LSTM) or module.proj_size or not _is_onednns(weights):
                raise _lost(type(model).__name__, f"{name or 'the model'} is a {type(module).__name__}")


def lstm(  # noqa: PLR0917  (the op's own signature)
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
    """`aten.lstm.input`, as eager runs it where oneDNN takes it (`lstm_mkldnn` in native/mkldnn/RNN.cpp)."""
    hidden, cell = state
    if hidden.size(2) != cell.size(2) or not x.numel() or not _is_onednns((x, *state, *weights)):
        if dropout and train and layers > 1:
            raise _lost("nn.LSTM", "an LSTM that oneDNN does not run")
        with _without_onednn():  # the decomposition knows no gradients of its kernels
            whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten.lstm.input(
                x, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first
            )
        return whole
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
    """Say how large the workspaces are that the kernels hand to their backward: their fakes say zero bytes.

    Only oneDNN knows: the kernel runs once for each distinct shape, on zeros. What no backward reads is not made.
    """
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        items = [u for u in node.users if u.target is operator.getitem and u.args[1] == _WORKSPACE]
        if not any(item.users for item in items):
            continue
        x, weight, recurrent = (value(n) for n in node.args[:3])
        nbytes = _workspace_bytes(tuple(x.shape), tuple(weight.shape), tuple(recurrent.shape), tuple(node.args[7:]))
        with fake_mode_of(graph):
            workspace = torch.empty(nbytes, dtype=torch.uint8)
        correct_results(node, (*value(node)[:_WORKSPACE], workspace))


@lru_cache(maxsize=256)
def _workspace_bytes(
    x: tuple[int, ...], weight: tuple[int, ...], recurrent: tuple[int, ...], how: tuple[Any, ...]
) -> int:
    bias, state = torch.zeros(weight[0]), torch.zeros(x[1], recurrent[1])
    given = (torch.zeros(x), torch.zeros(weight), torch.zeros(recurrent), bias, bias, state, state)
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():  # as at run time: only then there is one
        return int(aten.mkldnn_rnn_layer.default(*given, *how)[_WORKSPACE].numel())


def _is_onednns(tensors: Sequence[torch.Tensor]) -> bool:
    plain = all(t.device.type == "cpu" and t.dtype is torch.float32 for t in tensors)
    return plain and torch._C._has_mkldnn and bool(torch._C._get_mkldnn_enabled())


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """`torch.backends.mkldnn.flags` would set what it is not asked to."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _by_direction(weights: Sequence[torch.Tensor], has_biases: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """Two matrices and two biases for each layer and direction."""
    each = 4 if has_biases else 2
    for i in range(0, len(weights), each):
        own = tuple(weights[i : i + each])
        yield own if has_biases else (*own, *(w.new_zeros(w.size(0)) for w in own))  # no kernel looks at those


def _lost(model: str, what: str) -> UnsupportedGraph:
    hint = "use dropout=0 there and nn.Dropout between single-layer modules"
    return UnsupportedGraph(model, f"{what} with dropout, which tracing loses", hint)
