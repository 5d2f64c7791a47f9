"""Inductor's wrapper is recorded for memplan's compilations only, and its lines are those that memplan knows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._inductor.codegen import common
from torch._inductor.codegen import wrapper as lines
from torch._inductor.exc import InvalidCxxCompiler

import memplan
from memplan.errors import UnsupportedDevice, UnsupportedGraph
from memplan.integrations.inductor.wrapper_lines import _HARMLESS as HARMLESS
from memplan.integrations.inductor.wrapper_lines import _changes as changes
from memplan.torch_inside import versions as torch_versions
from memplan.torch_inside.versions import UNPLANNED_LINES
from memplan.trace.fused import environment
from memplan.trace.fused.kernel_runs import Allocation
from memplan.trace.fused.wrapper import _READERS, _SILENT, RecordingWrapper, read_line, recording

# What memplan reads of each line of Inductor's code: the names of its fields, in torch 2.13.
FIELDS = {
    "AllocateLine": {"wrapper", "node", "comm_buffer"},
    "ReuseLine": {"wrapper", "node", "reused_as", "delete_old", "comm_buffer"},
    "ReinterpretLine": {"wrapper", "node", "reused_as", "layout"},
    "MultiOutputLine": {"wrapper", "result_name", "arg_name", "indices"},
    "ExternKernelOutLine": {"wrapper", "node"},
    "ExternKernelMultiOutLine": {"wrapper", "node"},
    "ExternKernelAllocLine": {"wrapper", "node"},
    "IndexPutFallbackLine": {"wrapper", "node", "indices"},
    "ScatterFallbackLine": {"wrapper", "node"},
    "FreeLine": {"wrapper", "node"},
    "FreeIfNotReusedLine": {"wrapper", "node", "is_reused", "comm_buffer"},
    "KernelDefinitionLine": {"wrapper", "kernel_name", "kernel_body", "metadata", "gpu", "cpp_definition"},
}
RENAMED = {"ReuseLine", "ReinterpretLine", "MultiOutputLine"}
SINCE_2_13 = {"ExternKernelMultiOutLine"}
CALL_FIELDS = {"kernel_name", "call_args", "arg_types", "triton", "triton_meta", "inductor_meta", "device"}


def test_inductors_lines_have_the_fields_that_are_read() -> None:
    for name, fields in FIELDS.items():
        if name not in SINCE_2_13 or hasattr(lines, name):
            assert {f.name for f in dataclasses.fields(getattr(lines, name))} == fields, name
    assert {f.name for f in dataclasses.fields(lines.KernelCallLine)} >= CALL_FIELDS


def test_the_registration_is_restored_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    common.init_backend_registration()
    before = common.device_codegens["cpu"]
    passes = object()
    monkeypatch.setitem(common.custom_backend_passes, "cpu", passes)
    with recording("cpu"):
        assert common.device_codegens["cpu"].wrapper_codegen is RecordingWrapper
    assert common.device_codegens["cpu"] is before
    assert common.custom_backend_passes["cpu"] is passes
    with pytest.raises(RuntimeError, match="inside"), recording("cpu"):
        raise RuntimeError("inside")
    assert common.device_codegens["cpu"] is before


def test_a_compilation_that_is_not_recorded_gets_inductors_own_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    monkeypatch.setattr(lines.PythonWrapperCodegen, "create", lambda *_: own)
    assert RecordingWrapper.create(False, None, None) is own
    with recording("cpu"), pytest.raises(UnsupportedGraph, match="a graph inside the graph"):
        RecordingWrapper.create(True, "", None)


KINDS = [kind for kind in vars(lines).values() if isinstance(kind, type) and issubclass(kind, lines.WrapperLine)]
BASES = {"WrapperLine", "MemoryPlanningLine"}  # which Inductor does not write


def _refusals(line: Any) -> list[UnsupportedGraph]:
    """Return the errors of both readers of Inductor's code for a line: that of plans, and that of the partitioner."""
    line.comm_buffer = line.unbacked_bindings = True
    with pytest.raises(UnsupportedGraph) as by_plan:
        read_line(line, "")
    assert by_plan.value.see == "inductor-code"
    if type(line).__name__ in {"AllocateLine"} | HARMLESS:  # which the partitioner takes
        return [by_plan.value]
    with pytest.raises(UnsupportedGraph) as by_partitioner:
        list(changes(cast("Any", None), line))
    assert by_partitioner.value.see == "partitioner"
    return [by_plan.value, by_partitioner.value]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_line_of_this_torch_is_known_and_what_torch_adds_is_refused_by_name(kind: Any) -> None:
    """Known is what is read, or is refused with the reason. A kind that torch adds is neither, whatever its base."""
    name = kind.__name__
    read = {*_SILENT, *RENAMED, *_READERS, "AllocateLine", "KernelDefinitionLine"}
    assert name in read | BASES | set(UNPLANNED_LINES)
    if name in UNPLANNED_LINES:
        for error in _refusals(object.__new__(kind)):
            assert f"{UNPLANNED_LINES[name]} ({name})" in str(error)
    for error in _refusals(object.__new__(type("NewLine", (kind,), {}))):
        assert f"a line that is not known (NewLine, of torch {torch.__version__})" in str(error)
        assert error.hint


def test_a_buffer_of_a_collective_and_a_kernel_of_another_compiler_are_refused() -> None:
    node = SimpleNamespace(get_name=lambda: "buf0")
    allocate: Any = object.__new__(lines.AllocateLine)
    allocate.node, allocate.comm_buffer = node, False
    assert read_line(allocate, "") == Allocation(name="buf0")
    allocate.comm_buffer = True
    with pytest.raises(UnsupportedGraph, match="AllocateLine"):
        read_line(allocate, "")
    call: Any = object.__new__(lines.KernelCallLine)
    call.triton, call.device = False, torch.device("cuda")
    with pytest.raises(UnsupportedGraph, match="a kernel for cuda that Triton did not compile"):
        read_line(call, "")


def test_a_newer_torch_is_tried_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "KNOWN", ("1.0", "2.1"))
    model, x = torch.nn.Linear(4, 1), torch.ones(2, 4)
    with pytest.warns(UserWarning, match=r"newer than 2\.1, the newest release that memplan was tested with") as caught:
        plans = [memplan.plan(model, (x,), kernels="inductor") for _ in range(2)]
    assert len(caught) == 1
    assert plans[0].arena_size == plans[1].arena_size > 0
    monkeypatch.setattr(torch_versions, "KNOWN", ("1.0", "99.0"))
    memplan.plan(model, (x,), kernels="inductor")  # no warning, which would be an error


@pytest.mark.parametrize("version", ["2.14.0a0+git1", "2.14.1+cu130", "2.9.0", "2.15.0", "3.0.0"])
def test_releases_are_compared_as_numbers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "KNOWN", ("2.11", "2.14"))
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_versions.is_newer() == (version in ("2.15.0", "3.0.0"))


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(environment, "get_cpp_compiler", none)
    with pytest.raises(UnsupportedDevice, match=r"no C\+\+ compiler") as refused:
        environment.require_inductor()
    assert refused.value.see == "inductor-compiler"
