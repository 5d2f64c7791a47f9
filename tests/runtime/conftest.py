"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo knows no code of other tests, and they none of this one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
