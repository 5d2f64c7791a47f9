"""`stand_in`: has torch, dynamo, Inductor and Triton believe that this machine has a GPU. Nothing can run on it.

It cannot be undone: it belongs into a process that only plans (`child.py`).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Set
from types import SimpleNamespace
from typing import Any

import torch

from memplan.core.gpus import GpuTarget
from memplan.targets.attention import choose_attention
from memplan.targets.guard import install_guard

DEVICE = torch.device("cuda", 0)
_kept: list[torch.library.Library] = []  # kernels that are registered as long as these live


def stand_in(target: GpuTarget) -> Set[str]:
    """Have this process trace as on a machine with one GPU of this kind.

    Returns what there is to say of the steps that it traces from now on.

    Raises `LibraryNotInstalled` if `guard.cpp` cannot be built.
    """
    notes = set[str]()
    install_guard()
    _cuda(target)
    _forget()
    _fake_tensors()
    _kept.extend((choose_attention(target.capability, notes), _constants_on_the_host()))
    _triton(target)
    _inductor(target)
    return notes


def _properties(target: GpuTarget) -> SimpleNamespace:
    """Return what `torch.cuda.get_device_properties` would."""
    major, minor = target.capability
    return SimpleNamespace(
        name=target.full_name,
        major=major,
        minor=minor,
        total_memory=target.memory,
        multi_processor_count=target.multiprocessors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=target.threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=target.shared_memory,
        L2_cache_size=target.cache,
        gcnArchName="",
    )


class _Here:
    """`torch.cuda.device`: one device, which is always the current one."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _cuda(target: GpuTarget) -> None:
    """Answer what is asked of `torch.cuda` and `torch.accelerator`, by torch and by dynamo's interface of devices."""
    from torch._dynamo.device_interface import CudaInterface

    properties = _properties(target)
    stream = SimpleNamespace(cuda_stream=0, device=DEVICE, stream_id=0, device_index=0, device_type=1)
    answers: dict[str, Any] = {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": target.capability,
        "get_device_name": target.full_name,
        "is_bf16_supported": True,
        "set_device": None,
        "synchronize": None,
        "mem_get_info": (target.memory, target.memory),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "set_rng_state": None,
        "get_rng_state_all": [],
        "current_stream": stream,
    }
    functions = {name: _answering(answer) for name, answer in answers.items()}
    functions["get_rng_state"] = lambda *_: torch.zeros(16, dtype=torch.uint8)
    module = torch.get_device_module("cuda")
    _set(module, **functions, device=_Here)
    _set(module.random, get_rng_state=functions["get_rng_state"], set_rng_state=functions["set_rng_state"])
    asked = ("current_device", "set_device", "device_count", "synchronize", "get_device_properties")
    for name in (*asked, "is_bf16_supported", "current_stream", "_exchange_device", "_maybe_exchange_device"):
        _set(CudaInterface, **{name.removeprefix("_"): staticmethod(functions[name])})
    _set(CudaInterface, get_raw_stream=staticmethod(_answering(0)), device=_Here)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # a build without CUDA, whose generated code imports it
        _set(torch._C, _cuda_getCurrentRawStream=_answering(0))
    # No tensor on the device holds numbers: dynamo asks for streams, memplan for what can run.
    available = {"is_available": _answering(False)}
    _set(
        torch.accelerator, **available, current_accelerator=lambda known=False, **how: None if known or how else DEVICE
    )


def _answering(answer: Any) -> Callable[..., Any]:
    """Return a function that has this answer to everything."""
    return lambda *_, **__: answer


def _set(thing: Any, **attributes: Any) -> None:
    """Set attributes of a module or class of torch."""
    for name, value in attributes.items():
        setattr(thing, name, value)


def _forget() -> None:
    """Forget what Inductor has asked of this machine before."""
    from torch._inductor import utils
    from torch.utils import _triton

    for known in (*vars(_triton).values(), *vars(utils).values()):
        if callable(clear := getattr(known, "cache_clear", None)):
            clear()


def _fake_tensors() -> None:
    """Make fake tensors on the device without asking for it."""
    from torch._subclasses import fake_tensor

    _set(fake_tensor, init_gpu_context=_answering(None))
    _set(fake_tensor.FakeTensorMode, avoid_device_init=property(_answering(True)))


def _constants_on_the_host() -> torch.library.Library:
    """Make tensors that hold numbers and that torch makes "on cuda" while it compiles (a constant) on the host."""

    def empty(size: Any, *, dtype: Any = None, layout: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
        """Return memory on the host."""
        made = torch.empty(size, dtype=dtype, layout=layout or torch.strided, device="cpu")
        return made if memory_format is None else made.contiguous(memory_format=memory_format)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        """Return memory on the host."""
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # a build for CUDA warns that its own kernels are replaced
        warnings.simplefilter("ignore", UserWarning)
        library.impl("empty.memory_format", empty, "CUDA")  # type: ignore[no-untyped-call]
        library.impl("empty_strided", empty_strided, "CUDA")  # type: ignore[no-untyped-call]
    return library


def _triton(target: GpuTarget) -> None:
    """Have Triton, where it is installed, generate code for the device."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton.runtime
    from triton.backends.compiler import GPUTarget

    major, minor = target.capability
    of_device = {
        "max_shared_mem": target.shared_memory,
        "multiprocessor_count": target.multiprocessors,
        "sm_clock_rate": 1_980_000,
        "mem_clock_rate": 3_201_000,
        "mem_bus_width": 6144,
        "warpSize": 32,
    }
    driver = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: of_device),
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_active_torch_device=lambda: DEVICE,
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_device_interface=lambda: torch.get_device_module("cuda"),
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(driver)


def _inductor(target: GpuTarget) -> None:
    """Answer what Inductor would measure: the bandwidth of memory, and whether padded products are faster."""
    from torch._inductor import utils
    from torch._inductor.fx_passes import pad_mm

    _set(utils, get_gpu_dram_gbps=_answering(int(target.bandwidth / 1e9)))
    _set(pad_mm, get_cached_should_pad=_answering(True))  # it asks of products that are bound by what they compute
