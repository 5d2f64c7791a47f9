"""The memory policy for torchtitan's graph_trainer, against its interface.

Where torchtitan is not installed, a stand-in mirrors what `torchtitan/experiments/graph_trainer/registry.py` and
`memory_policy.py` have at commit b5bcd76c66d0acb1a08b176d9639425bc55e0b2a (21 August 2026): a registry by name, filled
by a decorator, whose functions are called as `policy(gm, config=config)` with a graph module traced by `make_fx`. Nodes
of its backward have `meta["autograd_backward"]`; those of a module have `meta["custom"]["module_fqn"]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from memplan.errors import BudgetInfeasible, InvalidSize, LibraryNotInstalled

PATH = "torchtitan.experiments.graph_trainer.registry"
RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torchtitan's registry module, or the stand-in."""
    if find_spec("torchtitan") is not None:
        module = __import__(PATH, fromlist=["registry"])
        before = dict(module.MEMORY_POLICY_REGISTRY)
        yield module
        module.MEMORY_POLICY_REGISTRY.clear()
        module.MEMORY_POLICY_REGISTRY.update(before)
        return
    policies: dict[str, Callable[..., Any]] = {}

    def register_memory_policy(key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorator(fn: Callable[..., Any]) -> Callable[..., Any]:
            policies[key] = fn
            return fn

        return decorator

    parts = PATH.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        module.__spec__ = SimpleNamespace(name=module.__name__)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.MEMORY_POLICY_REGISTRY = policies  # type: ignore[attr-defined]
    module.register_memory_policy = register_memory_policy  # type: ignore[attr-defined]
    yield module


class Layers(nn.Module):
    """Layers, and a head that graph_trainer's pass does not compute again."""

    def __init__(self, width: int = 16, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )
        self.lm_head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.dropout(layer(x), 0.1, True)
        return self.lm_head(x)  # type: ignore[no-any-return]


def traced(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    """Forward, loss and backward as one graph, as `minimal_fx_tracer` traces it."""
    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        loss = functional_call(model, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
        return [loss, *torch.autograd.grad(loss, parameters)]

    with preserve_node_meta():
        gm = make_fx(step, tracing_mode="fake")([p.detach().requires_grad_() for p in model.parameters()], x)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    loss = next(i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mean.default)
    for node in nodes[loss + 1 :]:  # as graph_trainer's tracer marks what `torch.autograd.grad` runs
        node.meta["autograd_backward"] = True
    return gm


def policy_of(registry: Any, budget: Any, **options: Any) -> Any:
    from memplan.integrations import torchtitan

    torchtitan.register(budget, **options)
    return registry.MEMORY_POLICY_REGISTRY["memplan"]


def test_tags_keep_a_budget(registry: Any) -> None:
    gm = traced(Layers(), torch.randn(256, 16))
    assert any(node.meta.get("autograd_backward") for node in gm.graph.nodes)
    policy = policy_of(registry, 0.8)
    assert policy(gm, config=SimpleNamespace()) is gm
    tags = {node: node.meta["recompute"] for node in gm.graph.nodes if "recompute" in node.meta}
    assert policy.chosen.peak <= 0.8 * policy.chosen.plain_peak
    assert RECOMPUTE in tags.values()
    assert not any(node.meta.get("autograd_backward") for node in tags)
    for node, tag in tags.items():  # what is random is saved
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            assert tag is CheckpointPolicy.MUST_SAVE


def test_what_is_saved_is_enough(registry: Any) -> None:
    """Everything that the backward reads is saved, an input, or can be computed again from such."""
    gm = traced(Layers(), torch.randn(256, 16))
    policy_of(registry, 0.8)(gm, config=None)

    def reachable(node: fx.Node) -> bool:
        tag = node.meta.get("recompute")
        if node.op != "call_function" or tag is CheckpointPolicy.MUST_SAVE:
            return True
        return tag is RECOMPUTE and all(map(reachable, node.all_input_nodes))

    backward = [node for node in gm.graph.nodes if node.meta.get("autograd_backward")]
    read = {n for node in backward for n in node.all_input_nodes if not n.meta.get("autograd_backward")}
    assert read
    assert all(map(reachable, read))


def test_head_is_not_computed_again(registry: Any) -> None:
    gm = traced(Layers(), torch.randn(256, 16))
    for node in gm.graph.nodes:
        if node.op == "call_function" and not node.meta.get("autograd_backward"):
            node.meta["custom"] = {"module_fqn": "lm_head"}
    with pytest.raises(BudgetInfeasible):
        policy_of(registry, 0.8)(gm, config=None)


def test_without_need_nothing_is_tagged(registry: Any) -> None:
    gm = traced(Layers(), torch.randn(32, 16))
    policy = policy_of(registry, "1GiB")
    policy(gm, config=None)
    assert not any("recompute" in node.meta for node in gm.graph.nodes)
    assert policy.chosen.peak == policy.chosen.plain_peak


def test_impossible_budget_names_one_that_works(registry: Any) -> None:
    x = torch.randn(256, 16)
    with pytest.raises(BudgetInfeasible) as caught:
        policy_of(registry, "1KiB")(traced(Layers(), x), config=None)
    policy = policy_of(registry, caught.value.smallest)
    policy(traced(Layers(), x), config=None)
    assert policy.chosen.peak <= caught.value.smallest


def test_bad_budgets(registry: Any) -> None:
    with pytest.raises(InvalidSize):
        policy_of(registry, "min")


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_without_torchtitan() -> None:
    from memplan.integrations import torchtitan

    with pytest.raises(LibraryNotInstalled, match="torchtitan"):
        torchtitan.register("1GiB")
