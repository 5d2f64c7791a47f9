"""One case, run by eager, by `aot_eager` and by memplan, and what comes of it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import memplan
from memplan.errors import MemplanError
from tests.parity import judge, layouts
from tests.parity.cases import Case
from tests.parity.catalog import seed_everything
from tests.parity.judge import Outcome
from tests.parity.programs import Material, Program
from tests.parity.verdicts import Result, Verdict

# Their results are memory as it was found: nothing but shapes, types and strides can be compared.
UNINITIALIZED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "nn.Identity()")
)


_MISSING = object()
_Wrap = Callable[[Program], Callable[..., Any]]


class _Wrong(Exception):
    """A difference that memplan must not have. Raised and caught in this file."""


class _Rounded(Exception):
    """The first value that is eager's up to rounding and has not the bits of aot_eager's."""


def verdict_on(case: Case) -> Verdict:
    """Run the case and judge it; whatever a contender raises ends up in the verdict."""
    torch._dynamo.reset()
    material = Material(case)
    references = _References(material)
    eager = references.eager
    if eager[0].error is not None:
        return Verdict(case=case.name, result=Result.NO_REFERENCE, reason=f"eager raises {reason_of(eager[0].error)}")
    train = any(isinstance(x, torch.Tensor) and x.requires_grad for x in eager[0].results.values())
    try:
        planned = _Contender(material, lambda m: _compiled(m, material, train=train))
        ours = [
            planned.call(i) for i in range(len(case.call_layouts))
        ]  # all before the first is judged: none may change
        for i, outcome in enumerate(ours):
            _judge(case, i, outcome, references)
    except _Rounded as error:
        return Verdict(case=case.name, result=Result.ROUNDED, reason=str(error))
    except _Wrong as error:
        return Verdict(case=case.name, result=Result.WRONG, reason=str(error))
    except MemplanError as error:
        return Verdict(case=case.name, result=Result.REFUSED, reason=reason_of(error))
    except Exception as error:
        return Verdict(case=case.name, result=Result.UNTYPED, reason=f"{reason_of(error)} at {_raised_at(error)}")
    return Verdict(case=case.name, result=Result.PASSED)


class _References:
    """What others give for the calls of a case. `aot_eager` is compiled only where eager's bits are not memplan's."""

    def __init__(self, material: Material) -> None:
        self._material = material

    @cached_property
    def eager(self) -> list[Outcome]:
        """Eager, call by call."""
        return self._run(_noting_factors)

    @cached_property
    def eager_laid_out(self) -> list[Outcome]:
        """Eager with inputs as memplan lays them out and incoming gradients in dense memory.

        Random functions draw in the order of their input's memory, and derivatives that write into a copy of a gradient
        (those of the `*_scatter` functions) change several elements at once in eager where these share bytes.
        """
        return self._run(lambda m: m, laid_out=True, dense_gradients=True)

    @cached_property
    def aot_eager(self) -> list[Outcome]:
        """`aot_eager` with inputs as memplan lays them out, call by call."""
        return self._run(_aot_eager, laid_out=True)

    def is_near(self, value: Any, number: int, name: str, eager: Outcome) -> bool:
        """Whether a value is eager's up to rounding; where layouts differ, or terms cancel, by rules for these."""
        if judge.close(value, eager.values[name]):
            return True
        case = self._material.case
        differs = case.call_layouts[number] != case.layout
        differs = differs or (case.gradient_layouts[number] in layouts.OVERLAPPING and name in eager.gradients)
        if differs and judge.close(value, self.eager_laid_out[number].values.get(name, _MISSING)):
            return True
        if not judge.same_bits(value, self.aot_eager[number].values.get(name, _MISSING)):
            return False
        return judge.close(value, eager.values[name], scale=eager.magnitudes.get(name, 1.0))

    def _run(self, wrap: _Wrap, *, laid_out: bool = False, dense_gradients: bool = False) -> list[Outcome]:
        contender = _Contender(self._material, wrap)
        calls = range(len(self._material.case.call_layouts))
        return [contender.call(i, laid_out=laid_out, dense_gradients=dense_gradients) for i in calls]


def _compiled(program: nn.Module, material: Material, *, train: bool) -> Callable[..., Any]:
    seed_everything(0)
    example = material.example_inputs()  # what one plan refuses is listed, and not planned anew
    return memplan.compile(program, example, train=train, sanitize="poison", on_mismatch="error", fullgraph=True)


def _noting_factors(program: Program) -> Callable[..., Any]:
    program.factors = {}
    return program


def _aot_eager(program: nn.Module) -> Callable[..., Any]:
    return torch.compile(program, backend="aot_eager", dynamic=False)


class _Contender:
    """A program of its own, run in one way."""

    def __init__(self, material: Material, wrap: _Wrap) -> None:
        self.material = material
        self.program = material.program()
        self.run = wrap(self.program)

    def call(self, number: int, *, laid_out: bool = False, dense_gradients: bool = False) -> Outcome:
        """Forward and backward of one call. An error of memplan's own is raised, any other is part of the outcome."""
        inputs = self.material.inputs(number, laid_out=laid_out)
        self.program.zero_grad(set_to_none=True)
        seed_everything(100 + number)
        try:
            results = _leaves(self.run(*inputs))
            _backward(results, self.material.case.gradient_layouts[number], dense=dense_gradients)
        except MemplanError:
            raise
        except Exception as error:
            return Outcome(results={}, gradients={}, state={}, error=error)
        return _outcome(self.program, inputs, results)


def _leaves(result: Any) -> dict[str, Any]:
    return {f"result {i}": x for i, x in enumerate(pytree.tree_leaves(result))}


def _backward(results: Mapping[str, Any], layout: str, *, dense: bool) -> None:
    """Run the backward of all results that have one, with gradients that are the same for every contender."""
    roots = [x for x in results.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if roots:
        gradients = [_gradient(x, layout, i) for i, x in enumerate(roots)]
        if dense:
            gradients = [g if g.layout is not torch.strided else g.contiguous() for g in gradients]
        torch.autograd.backward(roots, gradients)


def _gradient(result: torch.Tensor, layout: str, number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(7 + number)
    values = torch.randn(result.shape, generator=made, dtype=result.dtype if result.is_complex() else torch.float32)
    return layouts.laid_out(values.to(result.dtype), layout)


def _outcome(program: Program, inputs: Sequence[torch.Tensor], results: dict[str, Any]) -> Outcome:
    gradients = {f"gradient of {name}": p.grad for name, p in program.named_parameters()}
    gradients |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad and x.is_leaf}
    state = {f"buffer {name}": b.detach().clone() for name, b in program.named_buffers()}
    state |= {f"input {i} afterwards": x.detach() for i, x in enumerate(inputs)}
    # the next call may write where these lie only if they are the caller's no more: they are not copied
    magnitudes = {f"gradient of {name}": size for name, size in program.magnitudes().items()}
    return Outcome(results=results, gradients=gradients, state=state, magnitudes=magnitudes)


def _judge(case: Case, number: int, ours: Outcome, references: _References) -> None:
    """Raise `_Wrong` or `_Rounded` for the first difference that must not be."""
    layout = case.call_layouts[number]
    where = f"call {number + 1} ({layout}, gradients {case.gradient_layouts[number]})"
    eager = references.eager[number]
    if eager.error is not None:
        odd = case.gradient_layouts[number] in layouts.OVERLAPPING  # kernels of eager's refuse some of these gradients
        if layout == case.layout and not odd and ours.error is None:
            raise _Wrong(f"{where}: eager raises {reason_of(eager.error)}, memplan returns")
        if layout == case.layout or references.aot_eager[number].error is not None:
            return
        eager = references.aot_eager[number]  # eager refuses this layout alone: the call was laid out as the example is
    if ours.error is not None:
        raise ours.error
    if ours.values.keys() != eager.values.keys():
        raise _Wrong(f"{where}: {len(ours.values)} values instead of {len(eager.values)}")
    listed = any(name in layouts.OVERLAPPING for name in (case.layout, layout))
    listed = listed or any(isinstance(x, torch.Tensor) and layouts.overlaps(x) for x in eager.results.values())
    for name, value in ours.values.items():
        difference = judge.seen(value, eager.values[name], strides=layout == case.layout and name in eager.results)
        if difference:
            raise _Wrong(f"{where}: {name} has {difference} of eager's")
        if case.entry in UNINITIALIZED or judge.same_bits(value, eager.values[name]):
            continue
        aot = references.aot_eager[number].values.get(name, _MISSING)
        if not references.is_near(value, number, name, eager):
            also = ", and aot_eager's is the same" if judge.same_bits(value, aot) else ""
            raise _Wrong(f"{where}: {name} is far from eager's{also}")
        if aot is not _MISSING and not listed and not judge.same_bits(value, aot):
            raise _Rounded(f"{where}: {name} has other bits than aot_eager's")


def reason_of(error: BaseException) -> str:
    """The error's class and first line, without what changes from run to run and from machine to machine."""
    text = error.what if isinstance(error, MemplanError) else str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    line = re.sub(r"0x[0-9a-f]+", "0x...", line)
    line = re.sub(r"(/[\w.+-]+){2,}", "...", line)
    line = re.sub(r"\{[^{}]*\}", "{...}", line)  # sets have no order
    line = re.sub(r"\s+", " ", line).replace("|", "/")
    return f"{type(error).__name__}: {line[:160].rstrip()}"


def _raised_at(error: BaseException) -> str:
    """The innermost frame of memplan's own."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "memplan/" in f.filename.replace("\\", "/")]
    frames = [f for f in frames if "/tests/" not in f.filename]
    if not frames:
        return "no frame of memplan"
    last = frames[-1]
    return f"memplan/{last.filename.rsplit('memplan/', 1)[-1]}:{last.lineno} in {last.name}"
