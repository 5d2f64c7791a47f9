"""Nets that branch, in which the order of ops matters: DenseNet, Inception, NASNet-A and RandWire, by their papers.

Each factory returns a module from images to class logits; `images(batch)` is what goes in. Widths and depths are
those of the published ImageNet models (NASNet-A mobile, RandWire "small"), to within the stem's details.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

CLASSES = 1000


class Images(nn.Module):
    """Cross-entropy of a classifier, so that `model(images, labels)` is a scalar training loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def conv(inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU; same padding."""
    padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Head(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mean((2, 3)))
        return out


class DenseLayer(nn.Module):
    """Huang et al. 2017: everything before it, through a bottleneck, to `growth` new channels."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False))
        self.two = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, before: list[Tensor]) -> Tensor:
        out: Tensor = self.two(self.one(torch.cat(before, 1)))
        return out


class DenseNet(nn.Module):
    """DenseNet-121."""

    def __init__(self, growth: int = 32, blocks: Sequence[int] = (6, 12, 24, 16)) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(conv(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for number, depth in enumerate(blocks):
            self.blocks.append(nn.ModuleList(DenseLayer(width + i * growth, growth) for i in range(depth)))
            width += depth * growth
            if number < len(blocks) - 1:
                norm = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False))
                self.transitions.append(nn.Sequential(norm, nn.AvgPool2d(2)))
                width //= 2
        self.head = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), Head(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            parts = [x]
            for layer in block:  # type: ignore[attr-defined]
                parts.append(layer(parts))
            x = torch.cat(parts, 1)
            if number < len(self.transitions):
                x = self.transitions[number](x)
        out: Tensor = self.head(x)
        return out


class Branches(nn.Module):
    """Parallel branches on one input, concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _inception_a(inputs: int, pool: int) -> Branches:
    return Branches(
        conv(inputs, 64),
        nn.Sequential(conv(inputs, 48), conv(48, 64, 5)),
        nn.Sequential(conv(inputs, 64), conv(64, 96, 3), conv(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, pool)),
    )


def _inception_c(inputs: int, width: int) -> Branches:
    wide, tall = (1, 7), (7, 1)
    return Branches(
        conv(inputs, 192),
        nn.Sequential(conv(inputs, width), conv(width, width, wide), conv(width, 192, tall)),
        nn.Sequential(
            conv(inputs, width), conv(width, width, tall), conv(width, width, wide), conv(width, width, tall),
            conv(width, 192, wide),
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, 192)),
    )  # fmt: skip


def _inception_e(inputs: int) -> Branches:
    return Branches(
        conv(inputs, 320),
        nn.Sequential(conv(inputs, 384), Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))),
        nn.Sequential(conv(inputs, 448), conv(448, 384, 3), Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, 192)),
    )


def inception() -> nn.Module:
    """Inception v3 (Szegedy et al. 2016), without its auxiliary classifier."""
    stem = nn.Sequential(
        conv(3, 32, 3, stride=2), conv(32, 32, 3), conv(32, 64, 3), nn.MaxPool2d(3, 2, 1), conv(64, 80),
        conv(80, 192, 3), nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip
    down = Branches(
        conv(288, 384, 3, stride=2),
        nn.Sequential(conv(288, 64), conv(64, 96, 3), conv(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, 2, 1),
    )
    down_again = Branches(
        nn.Sequential(conv(768, 192), conv(192, 320, 3, stride=2)),
        nn.Sequential(conv(768, 192), conv(192, 192, (1, 7)), conv(192, 192, (7, 1)), conv(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, 2, 1),
    )
    return nn.Sequential(
        stem, _inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64), down, _inception_c(768, 128),
        _inception_c(768, 160), _inception_c(768, 160), _inception_c(768, 192), down_again, _inception_e(1280),
        _inception_e(2048), Head(2048),
    )  # fmt: skip


def separable(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    """ReLU, depthwise and pointwise convolution, batch norm."""
    depthwise = nn.Conv2d(inputs, inputs, kernel, stride=stride, padding=kernel // 2, groups=inputs, bias=False)
    return nn.Sequential(nn.ReLU(), depthwise, nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


def _twice(width: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(separable(width, width, kernel, stride=stride), separable(width, width, kernel))


class Cell(nn.Module):
    """A cell of NASNet-A (Zoph et al. 2018), from the results of the two cells before it."""

    def __init__(self, before: int, now: int, width: int, *, reduce: bool, halve: bool) -> None:
        super().__init__()
        self.reduce = reduce
        self.before = nn.Sequential(
            nn.ReLU(), nn.Conv2d(before, width, 1, stride=2 if halve else 1, bias=False), nn.BatchNorm2d(width)
        )
        self.now = nn.Sequential(nn.ReLU(), nn.Conv2d(now, width, 1, bias=False), nn.BatchNorm2d(width))
        kernels = ((5, 7), (7,), (5,), (3,)) if reduce else ((5, 3), (5, 3), (3,))
        stride = 2 if reduce else 1
        first = [_twice(width, k, stride=stride) for k in kernels[0]]
        inner = [_twice(width, k[0], stride=1 if reduce and i == 2 else stride) for i, k in enumerate(kernels[1:])]
        second = [] if reduce else [_twice(width, 3)]
        self.separables = nn.ModuleList([*first, *inner, *second])
        self.average = nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        self.same = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.most = nn.MaxPool2d(3, stride, 1)

    def forward(self, before: Tensor, now: Tensor) -> Tensor:
        p, h, s = self.before(before), self.now(now), self.separables
        if self.reduce:
            one, two = s[0](h) + s[1](p), self.most(h) + s[2](p)
            three, four = self.average(h) + s[3](p), self.same(one) + two
            return torch.cat([two, three, four, s[4](one) + self.most(h)], 1)
        one, two = s[0](h) + s[1](p), s[2](p) + s[3](p)
        return torch.cat([p, one, two, self.average(h) + p, self.average(p) + self.average(p), s[4](h) + h], 1)


class NasNet(nn.Module):
    """NASNet-A 4 @ 1056 (mobile)."""

    def __init__(self, width: int = 44, repeats: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32))
        self.cells = nn.ModuleList()
        before, now, halve = 32, 32, False
        plan = [(width // 4, True), (width // 2, True)]
        for stage in range(3):
            plan += [(width * 2**stage, False)] * repeats
            plan += [(width * 2 ** (stage + 1), True)] if stage < 2 else []
        for cell_width, reduce in plan:
            self.cells.append(Cell(before, now, cell_width, reduce=reduce, halve=halve))
            before, now, halve = now, (4 if reduce else 6) * cell_width, reduce
        self.head = nn.Sequential(nn.ReLU(), Head(now))

    def forward(self, x: Tensor) -> Tensor:
        before = now = self.stem(x)
        for cell in self.cells:
            before, now = now, cell(before, now)
        out: Tensor = self.head(now)
        return out


class RandomStage(nn.Module):
    """A stage of RandWire (Xie et al. 2019): a Watts-Strogatz graph of separable convolutions."""

    def __init__(self, inputs: int, width: int, nodes: int, seed: int) -> None:
        super().__init__()
        self.sources = _watts_strogatz(nodes, 4, 0.75, seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(max(len(s), 1))) for s in self.sources)
        self.nodes = nn.ModuleList(
            separable(width if s else inputs, width, 3, stride=1 if s else 2) for s in self.sources
        )
        used = {node for sources in self.sources for node in sources}
        self.last = [node for node in range(nodes) if node not in used]

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        for number, sources in enumerate(self.sources):
            gathered = x
            if sources:
                shares = self.weights[number].sigmoid()
                gathered = results[sources[0]] * shares[0]
                for i, source in enumerate(sources[1:], 1):
                    gathered = gathered + results[source] * shares[i]
            results.append(self.nodes[number](gathered))
        total = results[self.last[0]]
        for number in self.last[1:]:
            total = total + results[number]
        return total / len(self.last)


def _watts_strogatz(nodes: int, degree: int, p: float, seed: int) -> list[list[int]]:
    """Sources of each node: a ring whose edges are rewired with probability `p`, directed from low to high."""
    draw = random.Random(seed)
    edges: set[tuple[int, int]] = set()
    for i in range(nodes):
        for step in range(1, degree // 2 + 1):
            j = (i + step) % nodes
            if draw.random() < p:
                j = draw.choice([k for k in range(nodes) if k != i and (min(i, k), max(i, k)) not in edges])
            edges.add((min(i, j), max(i, j)))
    return [sorted(a for a, b in edges if b == node) for node in range(nodes)]


def randwire(seed: int = 0) -> nn.Module:
    """RandWire, small regime: three random stages of 32 nodes, WS(4, 0.75)."""
    width = 78
    stages = [RandomStage(width * max(1, 2 ** (i - 1)), width * 2**i, 32, 3 * seed + i) for i in range(3)]
    stem = nn.Sequential(conv(3, width // 2, 3, stride=2), nn.Conv2d(width // 2, width, 3, stride=2, padding=1))
    return nn.Sequential(stem, *stages, conv(4 * width, 1280), Head(1280))


def images(batch: int) -> Tensor:
    """What goes in."""
    return torch.randn(batch, 3, 224, 224)


BRANCHING: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"densenet": DenseNet, "inception": inception, "nasnet": NasNet, "randwire": randwire}
)
