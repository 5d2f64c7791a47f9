"""What people change around a model while it trains: each is followed, or named in an error; never passed over."""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import memplan
from memplan.core.choices import OnMismatch
from memplan.errors import InputMismatch
from tests.runtime.reference import same_gradients
from tests.slow import slow

LOG = logging.getLogger(__name__)


class ReadsPython(nn.Module):
    """Reads of Python what people change from step to step."""

    offset = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3, bias=False)
        self.temperature = 1.0
        self.weights = [1.0, 2.0]
        self.config = {"scale": (1.0, 2.0)}
        self.activation = torch.tanh
        self.mask = torch.ones(())
        self.unread = 0

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        y: Tensor = self.activation(self.head(self.body(x))) / self.temperature * self.config["scale"][1]
        return y * self.mask + self.offset


def _temperature(model: Any) -> None:
    model.temperature *= 0.9


def _bias(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.ones(3))


def _more_modules(model: Any) -> None:
    model.body.append(nn.Tanh())


def _tensor(model: Any) -> None:
    model.mask = torch.zeros(())


def _patched(model: Any) -> None:
    was = model.head.forward
    model.head.forward = lambda x: was(x) / 2


def _frozen(model: Any) -> None:
    model.body[0].weight.requires_grad_(not model.body[0].weight.requires_grad)


CHANGES: dict[Callable[[Any], None], str] = {
    _temperature: "temperature",
    _bias: "head.bias",
    _more_modules: "body.4",
    _tensor: "mask",
    _patched: "head",
    _frozen: "body.0.weight",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_raises_until_it_is_undone_or_compiled(change: Callable[[Any], None]) -> None:
    model, x = ReadsPython(), torch.randn(5, 4)
    compiled = memplan.compile(model, x, on_mismatch="error")
    compiled(x).sum().backward()
    change(model)
    for _ in range(2):  # as a cell of a notebook that is run again
        with pytest.raises(InputMismatch) as caught:
            compiled(x)
        assert caught.value.where == CHANGES[change]
    memplan.compile(model, x, on_mismatch="error")(x)


@pytest.mark.parametrize("how", ["replan", "eager"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_followed_where_that_was_asked(how: OnMismatch, change: Callable[[Any], None]) -> None:
    model, x = ReadsPython(), torch.randn(5, 4)
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, x, on_mismatch=how)
    for step in range(4):
        if step % 2 and (step == 1 or change in (_temperature, _frozen)):
            change(model)
            torch.manual_seed(step)
            change(twin)
        outputs = []
        for one in (compiled, twin):
            torch.manual_seed(step)
            one.zero_grad()
            outputs.append(one(x))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        assert same_gradients(compiled, twin)


@pytest.mark.parametrize("change", [_temperature, slow(_frozen)])
def test_a_change_is_seen_by_the_program_of_another_shape(change: Callable[[Any], None]) -> None:
    model, x = ReadsPython(), torch.randn(6, 4)
    change(model)
    compiled = memplan.compile(model, x, dynamic_shapes={"x": {0: Dim("batch", min=2, max=64)}}, on_mismatch="error")
    compiled(x).sum().backward()
    change(model)
    with pytest.raises(InputMismatch, match=CHANGES[change]):
        compiled(x[:5])


@pytest.mark.parametrize("read", ["offset", "scale"])
def test_what_the_class_holds_and_one_element_of_a_tuple_are_read(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ReadsPython(), torch.randn(5, 4)
    compiled = memplan.compile(model, x, on_mismatch="error")
    compiled(x)
    if read == "offset":
        monkeypatch.setattr(ReadsPython, "offset", 2.0)
    else:
        model.config["scale"] = (1.0, 3.0)
    with pytest.raises(InputMismatch, match=read):
        compiled(x)


def test_what_forward_does_not_read_may_change() -> None:
    model, x = ReadsPython(), torch.randn(5, 4)
    compiled = memplan.compile(model, x)
    model.unread += 1
    model.weights = [1.0, 2.0]  # other lists, the same numbers
    model.temperature = float("1")
    compiled(x).sum().backward()


def test_what_was_traced_twice_is_still_a_constant() -> None:
    model, x = ReadsPython().eval(), torch.randn(5, 4)
    for temperature in (1.0, 0.9):  # dynamo takes what it has seen change for a variable
        model.temperature = temperature
        compiled = memplan.compile(model, x, on_mismatch="error")
        assert torch.equal(compiled(x), model(x))
        model.temperature = 3.0
        with pytest.raises(InputMismatch, match=r"temperature: is 3\.0"):
            compiled(x)


def test_a_step_refuses_parameters_that_its_optimizer_does_not_know() -> None:
    model, x = nn.Linear(4, 1), torch.randn(5, 4)
    step = memplan.compile_step(model, torch.optim.SGD(model.parameters(), 0.1), lambda out: out.square().mean(), x)
    step(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    step(x)
    model.load_state_dict(state, assign=True)
    for _ in range(2):
        with pytest.raises(InputMismatch, match="not the parameter that the optimizer has"):
            step(x)


def test_parametrizations_train_like_eager() -> None:
    model, x = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), torch.randn(5, 4)
    solves = nn.utils.parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map="cayley")
    assert torch.equal(memplan.compile(solves, x)(x), solves(x))
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, x)
    for mode in (True, True, False, True):
        for one in (compiled, twin):
            one.train(mode).zero_grad()
            one(x).square().mean().backward()
    for p, q in zip((*model.parameters(), *model.buffers()), (*twin.parameters(), *twin.buffers()), strict=True):
        assert torch.equal(p, q)
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


TABLE = {"scale": 2.0}


class ReadsAll(nn.Module):
    """Reads a table of the file, a module that nobody registered, an enumeration, a number of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = {"drop": nn.Dropout(0.0)}
        self.colour = Colour.RED
        self.scale: Any = np.float32(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.table["drop"](self.linear(x)) * TABLE["scale"]
        return y * self.scale if self.colour is Colour.RED else y


class Decorated(ReadsAll):
    @torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.colour is Colour.RED else -y


@pytest.mark.parametrize(
    ("model", "word", "change"),
    [
        (ReadsAll, "scale", lambda m: TABLE.update(scale=3.0)),
        (ReadsAll, "drop", lambda m: m.table.update(drop=nn.Dropout(0.5))),
        (ReadsAll, "training", lambda m: m.table["drop"].eval()),
        (ReadsAll, "colour", lambda m: setattr(m, "colour", Colour.BLUE)),
        (ReadsAll, "scale", lambda m: setattr(m, "scale", np.float32(3))),
        (Decorated, "colour", lambda m: setattr(m, "colour", Colour.BLUE)),
    ],
)
def test_what_else_forward_reads(
    model: type[nn.Module], word: str, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "scale", 2.0)
    made, x = model(), torch.randn(3, 4)
    compiled = memplan.compile(made, x, on_mismatch="error")
    assert torch.equal(compiled(x), made(x))
    change(made)
    with pytest.raises(InputMismatch, match=word):
        compiled(x)


def test_a_teacher_in_a_loss_is_a_constant() -> None:
    x = torch.randn(5, 4)
    teacher = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9)).requires_grad_(False)
    for change in (teacher.eval, lambda: setattr(teacher[0], "weight", nn.Parameter(torch.ones(3, 4)))):
        model = nn.Linear(4, 3)
        step = memplan.compile_step(
            model,
            torch.optim.SGD(model.parameters()),
            lambda y: (y - teacher(x)).square().mean(),
            x,
            on_mismatch="error",
        )
        step(x)
        change()
        with pytest.raises(InputMismatch, match=r"training|weight"):
            step(x)


def test_stand_ins_for_parameters_get_gradients_behind_torch_compile() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    compiled: Any = torch.compile(model, backend=memplan.Backend())
    for one in (compiled, model, compiled):
        given = {name: p.detach().clone().requires_grad_() for name, p in one.named_parameters()}
        torch.func.functional_call(one, given, (x,)).sum().backward()
        assert all(p.grad is not None for p in given.values())


def test_what_a_configuration_settles_and_what_forward_logs() -> None:
    class Config:
        def __init__(self) -> None:
            self.kind: str | None = None

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.config.kind is None:
                self.config.kind = "single label"
            LOG.warning("called")
            y: Tensor = self.head(x)
            return y

    model, x = Classifier(), torch.randn(5, 4)
    compiled = memplan.compile(model, x, on_mismatch="error")
    assert model.config.kind == "single label"
    assert torch.equal(compiled(x), model(x))
    model.config.kind = None
    with pytest.raises(InputMismatch, match=r"config\.kind: is None, the plan was made for 'single label'"):
        compiled(x)


def test_parameters_of_a_model_whose_forward_was_patched_are_followed() -> None:
    model: Any = nn.Linear(4, 3)
    was, x = model.forward, torch.randn(5, 4)
    model.forward = lambda given: was(given) / 2
    compiled = memplan.compile(model, x)
    model.load_state_dict({"weight": torch.randn(3, 4), "bias": torch.randn(3)}, assign=True)
    assert torch.equal(compiled(x), model(x))
