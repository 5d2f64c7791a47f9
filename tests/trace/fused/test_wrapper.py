"""Inductor's wrapper is recorded for memplan alone, and replaying its lines tells what each kernel reads and writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen import common
from torch._inductor.codegen import wrapper as lines
from torch._inductor.exc import InvalidCxxCompiler

import memplan
from memplan.errors import UnsupportedDevice, UnsupportedGraph
from memplan.torch_inside import versions as torch_versions
from memplan.torch_inside.versions import UNPLANNED_LINES
from memplan.trace.fused import environment
from memplan.trace.fused.kernel_runs import (
    Allocation,
    Block,
    BlockView,
    KernelLine,
    Renaming,
    Replay,
    TensorSpec,
    WrittenCode,
    extent,
    piece_of,
)
from memplan.trace.fused.wrapper import _READERS, _SILENT, RecordingWrapper, read_line, recording

RENAMED = {"ReuseLine", "ReinterpretLine", "MultiOutputLine"}


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


def _refusal(line: Any) -> UnsupportedGraph:
    """Return the error of the reader of Inductor's code for a line."""
    line.comm_buffer = line.unbacked_bindings = True
    with pytest.raises(UnsupportedGraph) as caught:
        read_line(line, "")
    assert caught.value.see == "inductor-code"
    return caught.value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_line_of_this_torch_is_known_and_what_torch_adds_is_refused_by_name(kind: Any) -> None:
    """Known is what is read, or is refused with the reason. A kind that torch adds is neither, whatever its base."""
    name = kind.__name__
    read = {*_SILENT, *RENAMED, *_READERS, "AllocateLine", "KernelDefinitionLine"}
    assert name in read | BASES | set(UNPLANNED_LINES)
    if name in UNPLANNED_LINES:
        assert f"{UNPLANNED_LINES[name]} ({name})" in str(_refusal(object.__new__(kind)))
    error = _refusal(object.__new__(type("NewLine", (kind,), {})))
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


CPU = torch.device("cpu")


def _spec(*shape: int) -> TensorSpec:
    strides = torch.empty(shape).stride()
    nbytes = 4 * torch.Size(shape).numel()
    return TensorSpec(dtype=torch.float32, device=CPU, shape=shape, strides=strides, offset=0, nbytes=nbytes)


def _given(name: str, *shape: int) -> BlockView:
    return piece_of(Block(name=name, device=CPU, nbytes=4 * torch.Size(shape).numel(), given=True), torch.empty(shape))


def _replay(lines: list[Any], **inputs: BlockView) -> Replay:
    specs = {f"buf{i}": _spec(4, 4) for i in range(6)}
    namespace = {"cpp_fused": lambda *_: None, "torch": torch, "aten": torch.ops.aten, "table": torch.ones(3)}
    code = WrittenCode(lines=lines, inputs=tuple(inputs), specs=specs, namespace=namespace)
    code.sources["cpp_fused"] = "void kernel() {}"
    return Replay(code, inputs)


def _call(text: str, *written: int | str, **options: Any) -> KernelLine:
    return KernelLine(text=text, kernel="cpp_fused", written=frozenset(written), **options)


def test_a_first_write_reads_nothing_and_a_later_one_does() -> None:
    lines = [Allocation(name="buf0"), _call("cpp_fused(x, buf0)", 1), _call("cpp_fused(x, buf0)", 1)]
    first, second = _replay(lines, x=_given("x", 4, 4)).run()
    assert [p.block.name for p in first.reads] == ["x"]
    assert [p.block.name for p in first.writes] == ["buf0"]
    assert [p.block.name for p in second.reads] == ["x", "buf0"]


def test_a_buffer_in_place_of_another_shares_its_block() -> None:
    lines = [
        Allocation(name="buf0"),
        _call("cpp_fused(x, buf0)", 1),
        Renaming(text="buf1 = buf0; del buf0  # reuse"),
        _call("cpp_fused(buf1)", 0),
    ]
    first, second = _replay(lines, x=_given("x", 4, 4)).run()
    assert second.writes[0].block is second.reads[0].block is first.writes[0].block


def test_views_have_their_layout_and_offset() -> None:
    lines = [
        Allocation(name="buf0"),
        Renaming(text="buf1 = reinterpret_tensor(buf0, (2, 4), (4, 1), 8)  # alias"),
        _call("cpp_fused(reinterpret_tensor(x, (16, ), (1, ), 0), buf1)", 1),
    ]
    (run,) = _replay(lines, x=_given("x", 4, 4)).run()
    assert (run.writes[0].shape, run.writes[0].strides, run.writes[0].offset) == ((2, 4), (4, 1), 8)
    assert extent(run.writes[0]) == 64
    assert run.reads[0].shape == (16,)


def test_a_kernel_that_reads_what_it_wrote_itself_reads_nothing_from_before() -> None:
    lines = [
        Allocation(name="buf0"),
        Renaming(text="buf1 = reinterpret_tensor(buf0, (2, 4), (4, 1), 0)  # alias"),
        Renaming(text="buf2 = reinterpret_tensor(buf0, (2, 4), (4, 1), 8)  # alias"),
        _call("cpp_fused(x, buf1, buf2, buf0)", 1, 2),
    ]
    (run,) = _replay(lines, x=_given("x", 4, 4)).run()
    assert [p.block.name for p in run.reads] == ["x"]
    assert [p.offset for p in run.writes] == [0, 8, 0]


def test_a_call_of_which_nothing_is_known_may_change_all_of_its_arguments() -> None:
    (run,) = _replay([KernelLine(text="aten.bernoulli_(x, 0.5)", known=False)], x=_given("x", 4, 4)).run()
    assert run.reads == run.writes != ()
    assert not run.known


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (KernelLine(text="cpp_fused(x); cpp_fused(x)"), "2 calls in one line"),
        (KernelLine(text="nothing_of_that_name(x)"), "nothing_of_that_name"),
        (Renaming(text="buf0 = cpp_fused(x)"), "gets a name"),
        (KernelLine(text="cpp_fused(aten.view.dtype(x, torch.float64))"), "another size"),
        (KernelLine(text="cpp_fused(x, changed)", changed=frozenset(("changed",))), "not known"),
        (KernelLine(text="cpp_fused(x)", changed=frozenset(("buf5",))), r"changes buf5, which is no tensor"),
        (KernelLine(text="cpp_fused(x)", kernel="cpp_other"), r"without source code \(cpp_other\)"),
        (KernelLine(text="cpp_fused(x[0])"), r"cannot be replayed \(cpp_fused\(x\[0\]\)\): TypeError"),
    ],
)
def test_code_that_cannot_be_replayed_is_refused(line: Any, words: str) -> None:
    with pytest.raises(UnsupportedGraph, match=words):
        _replay([line], x=_given("x", 4, 4)).run()
