"""Triton kernels in Inductor's code: what their calls read and write, and how they are compiled and launched.

What needs a GPU is in `tests/runtime/test_cuda_fused.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LambdaFuture
from torch._inductor.codegen import wrapper as lines
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.errors import UnsupportedGraph
from memplan.trace.fused import wrapper
from memplan.trace.fused.deferred import AligningKernel, DeferredTritonKernel, DeferringCompile, TunedKernel
from memplan.trace.fused.kernel_runs import (
    Block,
    BlockView,
    KernelLine,
    RandomState,
    Renaming,
    Replay,
    TensorSpec,
    WrittenCode,
)
from memplan.trace.fused.wrapper import read_line

FLOAT, COUNT = torch.float32, int
CUDA = torch.device("cuda:0")


def _call(monkeypatch: pytest.MonkeyPatch, signature: dict[str, str], **fields: Any) -> Any:
    """Return Inductor's line for a call of a Triton kernel whose parameters have these names."""
    monkeypatch.setattr(wrapper, "_origin", lambda names: SimpleNamespace(names=names))
    line: Any = object.__new__(lines.KernelCallLine)
    line.kernel_name, line.triton, line.device = "triton_poi_fused_add_0", True, CUDA
    line.triton_meta, line.inductor_meta = {"signature": signature}, {"mutated_arg_names": []}
    for name, value in fields.items():
        setattr(line, name, value)
    return line


def test_the_names_of_parameters_say_what_a_triton_kernel_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = dict.fromkeys(("in_out_ptr0", "in_ptr0", "in_ptr1", "out_ptr0"), "*fp32") | {"xnumel": "i32"}
    call = _call(
        monkeypatch,
        signature,
        call_args=["buf3", "primals_1", "primals_2", "buf4", 4096],
        arg_types=[FLOAT, FLOAT, FLOAT, FLOAT, COUNT],
        inductor_meta={"mutated_arg_names": ["in_out_ptr0", "in_ptr1"]},
    )
    found = read_line(call, "stream0 = get_raw_stream(0)\ntriton_poi_fused_add_0.run(..., stream=stream0)")
    assert isinstance(found, KernelLine)
    assert found.written == {0, 2, 3}
    assert found.text == "triton_poi_fused_add_0.run(buf3, primals_1, primals_2, buf4, 4096)"
    assert found.kernel == "triton_poi_fused_add_0"


@pytest.mark.parametrize(
    ("signature", "meta", "what"),
    [
        ({}, {"mutated_arg_names": []}, "not Inductor's own"),
        ({"in_ptr0": "*fp32", "xnumel": "i32"}, {}, "not Inductor's own"),
        ({"ws_ptr": "*u8", "xnumel": "i32"}, {"mutated_arg_names": []}, "ws_ptr of triton_poi_fused_add_0"),
        ({"in_ptr0": "i64", "xnumel": "i32"}, {"mutated_arg_names": []}, "a number in the memory of the host"),
    ],
    ids=["no names", "a user's kernel", "a workspace", "a number"],
)
def test_parameters_that_are_not_known_are_refused(
    monkeypatch: pytest.MonkeyPatch, signature: dict[str, str], meta: dict[str, Any], what: str
) -> None:
    given = {"call_args": ["workspace_0", 8], "arg_types": [torch.uint8, COUNT]}
    call = _call(monkeypatch, signature, **given, inductor_meta=meta)
    with pytest.raises(UnsupportedGraph, match=what):
        read_line(call, "")


def _given(name: str, device: torch.device = CUDA) -> BlockView:
    block = Block(name=name, device=device, nbytes=32, given=True)
    return BlockView(block=block, dtype=FLOAT, shape=(8,), strides=(1,), offset=0)


def test_the_random_state_of_attention_goes_from_one_kernel_to_the_other() -> None:
    sdpa = torch.ops.aten._scaled_dot_product_efficient_attention.default
    scalar = TensorSpec(dtype=torch.int64, device=torch.device("cpu"), shape=(), strides=(), offset=0, nbytes=8)
    spec = TensorSpec(dtype=FLOAT, device=CUDA, shape=(8,), strides=(1,), offset=0, nbytes=32)
    taken = ["buf1 = buf0[0]", "buf2 = buf0[1]", "buf3 = buf0[2]", "buf4 = buf0[3]"]
    code = WrittenCode(
        lines=[
            KernelLine(text="buf0 = attention(primals_1, primals_1, primals_1, None, True)", overload=sdpa),
            *(Renaming(text=text) for text in taken),
        ],
        inputs=("primals_1",),
        outputs=("buf1", "buf3", "buf4"),
        specs={"buf1": spec, "buf2": spec, "buf3": scalar, "buf4": scalar},
        namespace={"attention": sdpa},
    )
    replay = Replay(code, {"primals_1": _given("primals_1")})
    (run,) = replay.run()
    out, seed, offset = replay.outputs()
    assert run.results[0] is out
    assert run.states == {2: seed, 3: offset}
    assert isinstance(seed, RandomState)
    assert seed is not offset
    assert set(run.results) == {0, 1}


class _Kernel:
    """A compiled kernel that notes how it is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], Any]] = []

    def run(self, *args: Any, stream: Any) -> None:
        self.launches.append((args, stream))


@pytest.mark.parametrize(("later", "widest"), [(False, 4096), (True, 4096), (True, 32768)])
def test_a_triton_kernel_is_compiled_once_and_launched_on_the_present_stream(
    monkeypatch: pytest.MonkeyPatch, later: bool, widest: int
) -> None:
    """Rows of 32,768 numbers are not held in registers, which takes minutes to compile."""
    made, asked = _Kernel(), []
    meta = "{'add_persistent_rblock': True, 'max_autotune': False}"
    source = f"size_hints={{'x': 512, 'r0_': {widest}}}, inductor_meta={meta}"

    def compile_it(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        asked.append((name, source, device_str))
        return LambdaFuture(lambda: made) if later else made

    monkeypatch.setattr(AsyncCompile, "triton", compile_it)
    kernel = DeferringCompile.triton(object.__new__(DeferringCompile), "triton_0", source, "cpu")
    assert isinstance(kernel, DeferredTritonKernel)
    assert not asked
    kernel.start()
    x = torch.zeros(8)
    kernel.compiled()(x, 8)
    kernel.run.compiled()(x, 8)
    kept = source if widest == 4096 else source.replace("'add_persistent_rblock': True, ", "")
    assert asked == [("triton_0", kept, "cpu")]
    assert [(args[1], stream) for args, stream in made.launches] == [(8, 0), (8, 0)]


def _aligning(monkeypatch: pytest.MonkeyPatch, *, written: bool) -> tuple[Callable[..., Any], _Kernel]:
    made = _Kernel()
    monkeypatch.setattr(AsyncCompile, "triton", lambda *_, **__: made)
    positions = [1]
    return AligningKernel(
        DeferredTritonKernel("triton_0", "source", "cpu"), positions, positions if written else []
    ).compiled(), made


def test_an_input_at_any_address_is_copied_for_a_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = _aligning(monkeypatch, written=False)
    out, x = torch.zeros(8), torch.arange(9.0)[1:]
    run(out, x, 8)
    run(out, out, 8)
    (first, _), (second, _) = made.launches
    assert first[0] is out
    assert first[1].data_ptr() % 16 == 0
    assert torch.equal(first[1], x)
    assert first[2] == 8
    assert second[1] is out


class _Tuner:
    """A kernel `out = x + 1` that is run several times when it is first called, as Inductor's tuning does."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, x: torch.Tensor, out: torch.Tensor, stream: Any) -> None:
        for _ in range(1 if self.calls else 5):
            torch.add(x, 1, out=out)
        self.calls += 1


class _Copies(TorchDispatchMode):
    """Notes the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.found += [x for x in args if isinstance(x, torch.Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("width", [8, 7])
def test_a_kernel_that_writes_over_what_it_reads_is_right_while_it_is_tuned(
    monkeypatch: pytest.MonkeyPatch, calls: int, width: int
) -> None:
    """Padded rows are copied whole: a copy of rows with gaps takes a second tensor of that size on a GPU."""
    made = _Tuner()
    monkeypatch.setattr(AsyncCompile, "triton", lambda *_, **__: made)
    kernel = DeferredTritonKernel("triton_0", "source", "cpu")
    runs = [
        TunedKernel(kernel, over=[1], written=[1]).compiled() for _ in range(calls)
    ]  # a kernel may be called at many places
    x = torch.zeros(4, 8)[:, :width]
    with _Copies() as copies:
        for number, run in enumerate(runs, 1):
            run(x, x)
            assert torch.equal(x, torch.full((4, width), float(number)))
    assert made.calls == 1 + calls
    assert copies.found
    assert all(tensor.is_contiguous() for tensor in copies.found)
