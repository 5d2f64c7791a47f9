"""Vision models of timm and torchvision, with random weights, in their training loops."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from benchmarks.program_run import NO_STEP, STEPS, Program, Run


def _classify(run: Run, net: nn.Module, size: int, *, smoothing: float = 0.0) -> None:
    """Train a classifier by SGD, and evaluate it on a larger batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
    batches = [(torch.randn(2, 3, size, size), torch.randint(5, (2,))) for _ in range(STEPS)]
    model = run.compile(net, batches[0][0])
    if run.whole_step:
        step = run.compile_step(net, optimizer, criterion, batches[0])
    model.train()
    for images, target in run.steps(batches):
        if run.whole_step:
            run.loss(step(images, target))
            continue
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(torch.ones(3, 3, size, size)))
    run.state(net)


def timm_resnet(run: Run) -> None:
    """Train timm's smallest ResNet."""
    import timm

    _classify(run, timm.create_model("test_resnet", num_classes=5), 64)


def timm_vit(run: Run) -> None:
    """Train timm's smallest vision transformer, with stochastic depth."""
    import timm

    _classify(run, timm.create_model("test_vit", num_classes=5, img_size=64, drop_path_rate=0.1), 64, smoothing=0.1)


def torchvision_resnet(run: Run) -> None:
    """Train torchvision's ResNet, of one block for each stage."""
    from torchvision.models.resnet import BasicBlock, ResNet

    _classify(run, ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5), 64)


def torchvision_raft(run: Run) -> None:
    """Train torchvision's RAFT, which estimates the flow between two pictures in two updates."""
    from torchvision.models.optical_flow import raft_small

    net = raft_small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    batches: list[Any] = [(torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)) for _ in range(STEPS)]
    flow = torch.randn(1, 2, 128, 128)
    model = run.compile(net, *batches[0], num_flow_updates=2)
    for first, second in run.steps(batches):
        optimizer.zero_grad()
        predictions = model(first, second, num_flow_updates=2)
        weighted = [0.8 ** (1 - i) * F.l1_loss(p, flow) for i, p in enumerate(predictions)]
        loss = torch.stack(weighted).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        run.loss(loss)
    run.state(net)


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "timm_resnet": Program(run=timm_resnet, libraries=("timm",)),
        "timm_vit": Program(run=timm_vit, libraries=("timm",)),
        "torchvision_resnet": Program(run=torchvision_resnet, libraries=("torchvision",)),
        "torchvision_raft": Program(run=torchvision_raft, libraries=("torchvision",), ways=NO_STEP),
    }
)
