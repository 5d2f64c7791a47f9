"""Loops that are common in tutorials: averages of weights, distillation, pairs of views, pruning, diffusion."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.program_run import NO_STEP, STEPS, Program, Run


class Net(nn.Module):
    """Convolutions, a norm and a head."""

    def __init__(self, out: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


def _batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, 12, 12), torch.randint(4, (4,))) for _ in range(STEPS)]


def ema(run: Run) -> None:
    """Train with an exponential average of the weights, and evaluate the average."""
    net, batches = Net(), _batches()
    model = run.compile(net, batches[0][0])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in run.steps(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        run.loss(loss)
    average.eval()
    with torch.no_grad():
        run.result("test", average(batches[0][0]))
    run.state(net)


def distillation(run: Run) -> None:
    """Train a student on the results of a frozen teacher."""
    teacher, student, batches = Net().eval().requires_grad_(False), Net(), _batches()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    model = run.compile(student, batches[0][0])
    for x, y in run.steps(batches):
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2.0, -1)
        optimizer.zero_grad()
        logits = model(x)
        soft = F.kl_div(F.log_softmax(logits / 2.0, -1), wanted, reduction="batchmean") * 4.0
        loss = 0.5 * soft + 0.5 * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    run.state(student)


def simclr(run: Run) -> None:
    """Train on two views of each picture: two forwards before one backward."""
    net = Net(8)
    model = run.compile(net, torch.zeros(4, 3, 12, 12))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for x, _ in run.steps(_batches()):
        one, two = (F.normalize(model(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        loss = F.cross_entropy(one @ two.T / 0.5, torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.loss(loss)
    run.state(net)


def byol(run: Run) -> None:
    """Train a network to predict the features of its own slow average."""
    net = Net(8)
    target = copy.deepcopy(net).requires_grad_(False)
    model = run.compile(net, torch.zeros(4, 3, 12, 12))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, _ in run.steps(_batches()):
        with torch.no_grad():
            wanted = F.normalize(target(x.flip(-1)))
        loss = (2 - 2 * (F.normalize(model(x)) * wanted).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, q in zip(net.parameters(), target.parameters(), strict=True):
            q.data.lerp_(p.data, 0.1)
        run.loss(loss)
    run.state(net)
    run.state(target, "target")


def pruning(run: Run) -> None:
    """Train, prune a third of the weights, and train on."""
    net, batches = Net(), _batches()
    prune.l1_unstructured(net.conv2, "weight", amount=0.3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = run.compile(net, batches[0][0])
    for i, (x, y) in enumerate(run.steps(batches)):
        if i == 1:
            prune.l1_unstructured(net.conv2, "weight", amount=0.3)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    run.state(net)


def transfer(run: Run) -> None:
    """Train the head alone, then unfreeze the body and give it to the optimizer."""
    net, batches = Net(), _batches()
    body = [p for name, p in net.named_parameters() if not name.startswith("head")]
    for p in body:
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)
    model = run.compile(net, batches[0][0])
    for i, (x, y) in enumerate(run.steps(batches)):
        if i == 1:
            for p in body:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": body, "lr": 1e-3})
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.loss(loss)
    run.state(net)


def autocast(run: Run) -> None:
    """Train under autocast, with gradients of two batches accumulated."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = _batches()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = run.compile(net, batches[0][0])
    for i, (x, y) in enumerate(run.steps(batches)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        run.loss(loss)
    run.state(net)


class Denoiser(nn.Module):
    """A network that predicts noise from a noisy picture and a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.norm(self.first(x)) + self.time(t[:, None])[:, :, None, None]
        return self.last(F.silu(h))


def diffusion(run: Run) -> None:
    """Train a denoiser at random times, and sample a few steps."""
    net = Denoiser()
    model = run.compile(net, torch.zeros(4, 3, 12, 12), torch.zeros(4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, _ in run.steps(_batches()):
        t, noise = torch.rand(4), torch.randn_like(x)
        noisy = x * (1 - t)[:, None, None, None] + noise * t[:, None, None, None]
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    sample = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        for i in range(3):
            sample = sample - 0.3 * model(sample, torch.full((2,), 1 - i / 3))
    run.result("sample", sample)
    run.state(net)


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        run.__name__: Program(run=run, ways=NO_STEP)
        for run in (ema, distillation, simclr, byol, pruning, transfer, autocast, diffusion)
    }
)
