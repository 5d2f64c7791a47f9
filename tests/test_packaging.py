"""The versions that are installed and tested: constraints, classifiers, workflow and installer say the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLDER = {path.stem.removeprefix("torch-"): path for path in (ROOT / "constraints").glob("torch-*.txt")}


def _pins(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _matrix(name: str) -> set[str]:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    found = re.search(rf"^ +{name}: \[(.*)\]$", workflow, flags=re.MULTILINE)
    assert found is not None
    return set(re.findall(r'"([^"]+)"', found[1]))


def test_constraints_of_each_torch_replace_pins_that_exist() -> None:
    pins = _pins(ROOT / "constraints.txt")
    for version, path in OLDER.items():
        own = _pins(path)
        assert own["torch"].startswith(f"{version}."), path
        assert set(own) <= set(pins), path


def test_the_workflow_runs_what_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    assert _matrix("torch") == set(OLDER)
    assert _matrix("python") == {c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)}


def test_a_torch_without_constraints_is_refused_before_anything_is_installed() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/install.sh")],
        env={**os.environ, "TORCH": "1.0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "there is no constraints/torch-1.0.txt; TORCH is one of: 2.11 2.12 2.13 2.14" in done.stderr


def _built(what: str, folder: Path) -> tuple[Path, list[str]]:
    """Return what setuptools builds ("sdist", "wheel") of the files of the checkout, and the names of these files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    files = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in files:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    code = f"from setuptools import build_meta; build_meta.build_{what}('..')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=folder / "source", capture_output=True, check=True)
    (made,) = folder.glob("memplan-*")
    return made, files


def test_the_source_distribution_holds_the_repository(tmp_path: Path) -> None:
    """So that it builds, tests and documents itself."""
    archive, files = _built("sdist", tmp_path)
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    assert sorted(set(files) - held) == []
    assert not [name for name in held if "__pycache__" in name]


def test_the_wheel_holds_every_file_that_the_package_reads() -> None:
    """The parts of the pages, schemas: whatever in the package is no Python is named as its data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["memplan"]
    package = ROOT / "memplan"
    data = [
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix in (".html", ".css", ".js", ".json", ".cpp")
    ]
    named = {path for pattern in patterns for path in package.glob(pattern)}
    assert len(data) > 10
    assert sorted(set(data) - named) == []


_NEWCOMER = """
import torch, memplan
from transformers import GPT2Config, GPT2LMHeadModel

class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=64, n_positions=128, use_cache=False)
        self.inner = GPT2LMHeadModel(config)
    def forward(self, tokens):
        return self.inner(tokens).logits

torch.manual_seed(0)
model, batch = Logits(), torch.randint(64, (8, 128))
budget = int(0.8 * memplan.plan(model, batch).total)
"""


@pytest.mark.slow
def test_a_newcomer_trains_a_gpt2_under_a_budget_with_the_wheel_alone(tmp_path: Path) -> None:
    """The quickstart's loop runs away from the checkout, and the topics of errors come with the wheel."""
    pytest.importorskip("transformers")
    wheel, _ = _built("wheel", tmp_path)
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(encoding="utf-8"), re.DOTALL)
    (loop,) = (block for block in blocks if block.startswith("compiled = memplan.compile(model, batch)"))
    loop = loop.replace("compile(model, batch)", "compile(model, batch, budget=budget)")
    said = "print(memplan.__file__, len(compiled.plan.evictions), compiled.plan.on_device <= budget, loss.item())"
    (tmp_path / "train.py").write_text(f"{_NEWCOMER}{loop}{said}\n", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    place, evictions, kept, loss = run("train.py").split()
    assert place == str(tmp_path / "site/memplan/__init__.py")
    assert int(evictions) > 0
    assert kept == "True"
    assert float(loss) > 0
    assert "budget" in run("-m", "memplan", "help", "budget")
