"""ExecuTorch's planning interface: by stand-ins for its types, and with ExecuTorch itself where it is installed."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memplan.errors import InvalidProblem, LibraryNotInstalled
from memplan.integrations.executorch import plan_memory

HAS = importlib.util.find_spec("executorch") is not None


@dataclass(eq=False)
class Spec:
    """The part of a `TensorSpec` that planning reads."""

    nbytes: int
    lifetime: list[int | None]
    mem_id: int | None = None
    storage_base: Spec | None = None
    storage_base_offset: int = 0
    allocated_memory: int = field(default=0)

    def realign(self, alignment: int) -> int:
        self.allocated_memory = -(-self.nbytes // alignment) * alignment
        return self.allocated_memory


@dataclass
class Place:
    """`SpecAllocResult`."""

    mem_id: int
    mem_obj_id: int
    mem_offset: int


@pytest.fixture
def _types(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put modules of ExecuTorch's names in place, with its result types."""
    planning = ModuleType("executorch.exir.memory_planning")
    made: Any = planning
    made.SpecAllocResult, made.MemoryAlgoResult = (
        Place,
        lambda places, sizes: SimpleNamespace(spec_dict=places, bufsizes=sizes),
    )
    for name in ("executorch", "executorch.exir"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "executorch.exir.memory_planning", planning)
    monkeypatch.setattr("memplan.integrations.executorch.require_library", lambda *args, **kwargs: None)
    return iter(())


def graph(specs: list[Spec], **attributes: Any) -> SimpleNamespace:
    nodes = [SimpleNamespace(meta={"spec": spec}) for spec in specs[::2]]
    nodes += [SimpleNamespace(meta={"spec": tuple(specs[1::2])}), SimpleNamespace(meta={})]
    return SimpleNamespace(graph=SimpleNamespace(nodes=nodes), **attributes)


@pytest.mark.usefixtures("_types")
@pytest.mark.parametrize("seed", range(4))
def test_tensors_that_are_alive_together_lie_apart(seed: int) -> None:
    draw = random.Random(seed)
    specs = []
    for _ in range(40):
        first = draw.randrange(60)
        lifetime: list[int | None] = [first, first + draw.randrange(1, 20)]
        specs.append(Spec(draw.randrange(0, 300), lifetime, draw.choice([None, 1, 3])))
    found = plan_memory(16, set(specs), graph(specs, input_mem_buffer_sizes=[0, 32]), None, 8)
    assert len(found.bufsizes) == 4
    assert found.bufsizes[0] == found.bufsizes[2] == 0
    for i, one in enumerate(specs):
        place = found.spec_dict[one]
        assert place.mem_offset % 16 == 0
        assert place.mem_id == (one.mem_id or 1)
        assert place.mem_offset >= (32 if place.mem_id == 1 else 0)
        assert place.mem_offset + one.allocated_memory <= found.bufsizes[place.mem_id] - 8
        for two in specs[:i]:
            other = found.spec_dict[two]
            (a, b), (c, d) = one.lifetime, two.lifetime
            assert None not in (a, b, c, d)
            if other.mem_id == place.mem_id and a <= d and c <= b:  # type: ignore[operator]  # inclusive
                assert (
                    place.mem_offset + one.allocated_memory <= other.mem_offset
                    or other.mem_offset + two.allocated_memory <= place.mem_offset
                )
    again = plan_memory(16, list(reversed(specs)), graph(specs, input_mem_buffer_sizes=[0, 32]), None, 8)
    assert [again.spec_dict[s] for s in specs] == [found.spec_dict[s] for s in specs]


@pytest.mark.usefixtures("_types")
def test_tensors_in_others_lie_there() -> None:
    base = Spec(64, [0, 9])
    part = Spec(32, [2, 3], storage_base=base, storage_base_offset=32)
    inner = Spec(16, [2, 3], storage_base=part, storage_base_offset=16)
    other = Spec(64, [1, 2])
    specs = [inner, other, part, base]
    found = plan_memory(16, specs, graph(specs), None)
    assert found.bufsizes == [0, 128]
    assert found.spec_dict[part].mem_offset == found.spec_dict[base].mem_offset + 32
    assert found.spec_dict[inner].mem_offset == found.spec_dict[base].mem_offset + 48
    assert plan_memory(16, [], graph([]), None).bufsizes == [0, 0]
    with pytest.raises(InvalidProblem, match="no place of its own"):
        plan_memory(16, [part], graph([part]), None)
    inner.storage_base, part.storage_base = part, inner
    with pytest.raises(InvalidProblem, match="no place of its own"):
        plan_memory(16, [inner, part, other], graph([other]), None)
    with pytest.raises(InvalidProblem, match="has no lifetime"):
        plan_memory(16, [Spec(8, [None, 3])], graph([]), None)


@pytest.mark.skipif(HAS, reason="ExecuTorch is installed")
def test_without_executorch_it_says_what_to_install() -> None:
    with pytest.raises(LibraryNotInstalled, match="pip install executorch"):
        plan_memory(16, [], graph([]), None)


@pytest.mark.skipif(not HAS, reason="pip install executorch")
def test_a_program_of_executorch_needs_no_more_than_by_its_greedy() -> None:
    from executorch.exir import ExecutorchBackendConfig, to_edge
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, greedy
    from executorch.exir.passes import MemoryPlanningPass

    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    exported = torch.export.export(layer, (torch.randn(2, 17, 64),))
    sizes = []
    for algorithm in (greedy, plan_memory):
        planning = MemoryPlanningPass(memory_planning_algo=MemoryPlanningAlgorithmSuite([algorithm]))
        program = to_edge(exported).to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
        sizes.append(sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes))
    assert 0 < sizes[1] <= sizes[0]
