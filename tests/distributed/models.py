"""Small models for several ranks, their batches, and the same model trained by torch alone."""

from __future__ import annotations

import torch
from torch import nn


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.two(x))))
        return x + added


class SmallGpt(nn.Module):
    """A GPT-2 of a few blocks, whose head is its embedding. Returns the logits."""

    def __init__(self, *, vocabulary: int = 64, width: int = 32, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class EvenGpt(SmallGpt):
    """A GPT-2 whose parameters 64 ranks divide evenly. Returns a loss."""

    def __init__(self) -> None:
        super().__init__(width=64, blocks=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return energy(super().forward(tokens))


class _GatedBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.each = width // heads
        self.one, self.two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.each)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.two(x)
        added: torch.Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + added


class SmallLlama(nn.Module):
    """A Llama of a few blocks, with a linear layer for each part of its attention. Returns the logits."""

    def __init__(self, *, vocabulary: int = 64, width: int = 32, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_GatedBlock(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class SmallConvolutions(nn.Module):
    """Convolutions with batch norm and a residual. Returns the logits of five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.inner_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.inner_norm(self.inner(x)).relu()
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def tokens(rank: int, step: int, *, rows: int = 2, length: int = 12, vocabulary: int = 64) -> torch.Tensor:
    """Return a batch of tokens, another one for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, vocabulary, (rows, length), generator=generator)


def images(rank: int, step: int, *, rows: int = 4) -> torch.Tensor:
    """Return a batch of small images, another one for each rank and step."""
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def vectors(rank: int, step: int, *, rows: int = 4, width: int = 10) -> torch.Tensor:
    """Return a batch of vectors, another one for each rank and step."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def energy(out: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of a result: a loss without targets."""
    return out.float().square().mean()
