"""Questions that are asked in a child process: its answer, its errors, what it says, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn

import pytest
import torch

from memplan.core.gpus import find_gpu
from memplan.errors import BudgetInfeasible, MemplanError, UnsupportedDevice
from memplan.targets.child import asked_for

H100 = find_gpu("h100")


def test_the_child_has_the_gpu_and_this_process_has_not() -> None:
    before = torch.cuda.is_available(), torch.cuda.get_device_name
    found = asked_for(
        H100, lambda: (torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.device_count())
    )
    assert found == ("NVIDIA H100 80GB HBM3", (9, 0), 1)
    assert (torch.cuda.is_available(), torch.cuda.get_device_name) == before


def test_a_process_that_has_trained_can_ask() -> None:
    """Autograd's threads are not in a copy of the process."""
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()

    def gradients() -> list[str]:
        """Run a backward of fake tensors on the device."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            weight = torch.empty(4, 4, device="cuda", requires_grad=True)
            (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            return [str(weight.grad.device)]

    assert asked_for(H100, gradients) == ["cuda:0"]


def test_a_process_whose_autograd_has_threads_for_a_device_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backward ran beside a device, a copy of the process cannot run another one."""

    def refused(*_: object) -> NoReturn:
        """Refuse, as autograd does in such a copy."""
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(torch.autograd, "grad", refused)
    with pytest.raises(UnsupportedDevice, match="plan in a process of its own"):
        asked_for(H100, torch.cuda.device_count)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_question_is_answered_too(mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode():
        assert asked_for(H100, lambda: torch.zeros(2).sum().item()) == 0


def test_what_the_child_raises_is_raised_here() -> None:
    def refused() -> NoReturn:
        """Refuse a budget."""
        raise BudgetInfeasible("needs more", where="the step", hint="give more", op="mm", smallest=7)

    with pytest.raises(BudgetInfeasible, match="needs more") as error:
        asked_for(H100, refused)
    assert (error.value.where, error.value.hint, error.value.smallest) == ("the step", "give more", 7)
    with pytest.raises(KeyError, match="nothing"):
        asked_for(H100, lambda: dict[str, int]()["nothing"])


def test_an_error_that_cannot_be_sent_keeps_its_words() -> None:
    class Own(Exception):
        """An error of a function's own class, which pickle does not find."""

    def fail() -> NoReturn:
        """Fail."""
        raise Own("of the model")

    with pytest.raises(RuntimeError, match="Own: of the model"):
        asked_for(H100, fail)


def test_the_child_ends_with_the_process_that_asks() -> None:
    """It does not go on with the program, either."""
    code = (
        "import os, time; from memplan.targets.child import asked_for; from memplan.core.gpus import find_gpu\n"
        "def wait(): print(os.getpid(), flush=True); time.sleep(600)\n"
        "try: asked_for(find_gpu('h100'), wait)\n"
        "except Exception: print('went on', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        child = int(asking.stdout.readline())
        asking.kill()
        assert asking.stdout.read() == ""
    _require_gone(child)


def _require_gone(child: int) -> None:
    """Wait until a process has ended."""
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {child} is still there")


def test_what_the_child_logs_and_warns_of_is_said_here(caplog: pytest.LogCaptureFixture) -> None:
    def says() -> int:
        """Say something of both kinds."""
        logging.getLogger("memplan").info("planning %d ops", 3)
        warnings.warn("this is late", UserWarning, stacklevel=1)
        return 5

    caplog.set_level(logging.INFO, logger="memplan")
    with pytest.warns(UserWarning, match="this is late"):
        assert asked_for(H100, says) == 5
    assert "planning 3 ops" in caplog.messages


def test_a_child_that_is_killed_is_an_error_that_says_so() -> None:
    with pytest.raises(MemplanError, match=r"ended without an answer \(signal 9\)") as error:
        asked_for(H100, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert "memory" in str(error.value.hint)


def test_ctrl_c_ends_both() -> None:
    """The process that asks is stopped as any other, and leaves no child."""
    code = (
        "import os, time; from memplan.targets.child import asked_for; from memplan.core.gpus import find_gpu\n"
        "def wait(): print(os.getpid(), flush=True); time.sleep(600)\n"
        "asked_for(find_gpu('h100'), wait)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as asking:
        assert asking.stdout is not None
        child = int(asking.stdout.readline())
        os.killpg(asking.pid, signal.SIGINT)
        _, said = asking.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert "Traceback" not in said.split("KeyboardInterrupt")[-1]
    _require_gone(child)
