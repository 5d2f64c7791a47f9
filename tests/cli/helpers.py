"""What several of the command line's tests use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplan.core.problem import Problem

Run = Callable[..., tuple[int, str, str]]

CSV = "id,lower,upper,size\na,0,4,16\nb,2,6,16\nc,4,8,32\n"


def python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **path, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def write_buffers(path: Path, problem: Problem) -> None:
    """Write the buffers of a problem without offsets, for a solver to place."""
    rows = [f"{b.id},{b.live.start},{b.live.end},{b.size}\n" for b in problem.buffers]
    path.write_text("id,lower,upper,size\n" + "".join(rows))


def embedded_data(page: str) -> dict[str, Any]:
    """The data that a page holds."""
    _, _, rest = page.partition('id="data">')
    found: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return found
