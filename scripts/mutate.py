"""Takes the mutation score of a module: how many small faults put into it its own tests notice.

    python scripts/mutate.py memplan/core/validate.py               all mutants
    python scripts/mutate.py memplan/planning/fit.py --most 60      a sample of at most 60, the same for the same seed
    python scripts/mutate.py memplan/check/check.py --share 0.2 --lines 130-180
    python scripts/mutate.py memplan/check/check.py --tests tests/check/test_check.py,tests/check/test_project.py

Needs the extra `mutation` (cosmic-ray, which makes the mutants and runs the tests). Works on copies of the checkout,
one for each job, so that the checkout is never changed. Prints killed, survived and timeouts, and every survivor with
the line that it changes. Mutants of annotations are left out: they are not evaluated. Which survivors are equivalent
is for a person to say. Exits 1 when the score is below `--least`, and 2 when none can be taken.

Kernels of the solvers run as plain Python: numba's cache does not detect changes of what another file's kernel calls.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "memplan",
    "tests",
    "benchmarks",
    "scripts",
    "pyproject.toml",
    "docs",
    "README.md",
    "CHANGELOG.md",
    ".importlinter",
)
_PLAIN = "memplan/solvers/"  # here, kernels run as plain Python
_SLACK, _LEAST_SECONDS = 4.0, 10.0  # a mutant may take so many times what the tests take as they are, and this at least

# Which tests judge a module, where they are not those that bear its name (see `tests_of`).
JUDGES: Mapping[str, tuple[str, ...]] = {
    "memplan/check/baseline.py": ("tests/check/test_baseline.py", "tests/cli/test_gate.py"),
    "memplan/check/check.py": (
        "tests/check/test_check.py",
        "tests/check/test_baseline.py",
        "tests/check/test_project.py",
    ),
    "memplan/core/legal_orders.py": ("tests/core/test_graph.py",),
    "memplan/planning/memory_answer.py": ("tests/planning/test_options.py",),
    "memplan/planning/planfile.py": ("tests/planning/test_planfile.py", "tests/behaviours/test_tensorref_devices.py"),
    "memplan/evict/equivalent.py": ("tests/evict/test_equivalent.py", "tests/evict/test_rng_states.py"),
    "memplan/evict/costs.py": ("tests/evict/test_feedback.py",),
    "memplan/core/files.py": ("tests/core/test_csvio.py", "tests/cli/test_outputs.py", "tests/cli/test_interrupts.py"),
    "memplan/runtime/memory/arena_ownership.py": ("tests/runtime/test_arena_ownership.py",),
    "memplan/runtime/execute/runner.py": ("tests/runtime/test_calls.py", "tests/runtime/test_hazards.py"),
    "memplan/runtime/guards/input_guards.py": ("tests/runtime/test_input_guards.py", "tests/runtime/test_calls.py"),
    "memplan/runtime/guards/parameter_guards.py": (
        "tests/runtime/test_parameter_guards.py",
        "tests/runtime/test_hazards.py",
        "tests/runtime/test_loops.py",
    ),
    "memplan/trace/fused/kernel_runs.py": ("tests/trace/fused/test_wrapper.py",),
    "memplan/trace/kernel_scratch.py": ("tests/trace/test_fits.py",),
    "memplan/solvers/base.py": ("tests/solvers/test_placement.py",),
    "memplan/solvers/arrays.py": ("tests/solvers/test_problem_arrays.py",),
    "memplan/solvers/baselines.py": ("tests/solvers/test_baselines.py", "tests/solvers/test_heuristics.py"),
    "memplan/solvers/placement.py": ("tests/solvers/test_placement.py",),
    "memplan/solvers/capacity_search.py": ("tests/solvers/test_thresholds.py",),
    "memplan/solvers/solve_at_capacity.py": ("tests/solvers/test_parts.py", "tests/solvers/test_thresholds.py"),
    "memplan/solvers/tree_search.py": ("tests/solvers/test_thresholds.py", "tests/solvers/test_search_kernel.py"),
    "memplan/solvers/branch_kernel.py": ("tests/solvers/test_search_kernel.py",),
    "memplan/solvers/heuristics.py": ("tests/solvers/test_heuristics.py",),
    "memplan/solvers/online_kernel.py": ("tests/solvers/test_heuristics.py",),
    "memplan/targets/attention.py": ("tests/targets/test_attention.py",),
    "memplan/runtime/debug/sanitizers.py": ("tests/runtime/test_checks.py",),
    "memplan/cli/report.py": ("tests/cli/test_commands.py",),
    "memplan/cli/compare.py": ("tests/cli/test_commands.py",),
    "memplan/cli/fits.py": ("tests/cli/test_commands.py",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of a module: cosmic-ray's operator and which of its places, and where that is."""

    operator: str
    occurrence: int
    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a mutant: "killed", "survived", "timeout" or "broken" (no test could be run)."""

    mutant: Mutant
    outcome: str
    change: str


class CannotScoreError(Exception):
    """No score can be taken: what is missing, and the next step."""


def tests_of(module: str) -> tuple[str, ...]:
    """The tests that judge `module`: those of the table, else the file of its name or the folder of its package.

    Packages without either are judged by the tests of the package around them.
    Raises `CannotScoreError` where there are none of these.
    """
    if module in JUDGES:
        return JUDGES[module]
    room, stem = Path("tests") / Path(module).parent.relative_to("memplan"), Path(module).stem
    while room != Path("tests").parent:
        for candidate in (room / f"test_{stem}.py", room):
            if candidate != Path("tests") and (ROOT / candidate).exists():
                return (str(candidate),)
        room = room.parent
    raise CannotScoreError(f"no tests are known for {module}: give --tests, or add it to JUDGES in scripts/mutate.py")


def mutants_of(module: Path) -> list[Mutant]:
    """All mutants of `module` that a run can notice, in the order of the file."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast_from_path(module)))
    unseen = list(_annotations(ast.parse(module.read_text(encoding="utf-8"))))
    found = []
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments():
            continue
        places = (start for node in nodes for start, _ in kind().mutation_positions(node))
        for occurrence, (line, column) in enumerate(places):
            if not any(start <= (line, column) < end for start, end in unseen):
                found.append(Mutant(operator=name, occurrence=occurrence, line=line, column=column))
    return sorted(found, key=lambda m: (m.line, m.column, m.operator))


def _annotations(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations stand, from and to."""
    for node in ast.walk(tree):
        for said in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(said, ast.expr):
                yield (said.lineno, said.col_offset), (said.end_lineno or 0, said.end_col_offset or 0)


def _enter(copies: Sequence[str], taken: str) -> None:
    """Go to a copy that no other job works in."""
    for copy in copies:
        try:
            os.mkdir(Path(taken, Path(copy).name))
        except FileExistsError:
            continue
        os.chdir(copy)
        return


def _judge(module: str, mutant: Mutant, command: str, seconds: float) -> Result:
    """Run the tests on one mutant, in the copy that this process works in."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import MutationSpec

    where = (mutant.line, mutant.column)
    spec = MutationSpec(
        module_path=module,
        operator_name=mutant.operator,
        occurrence=mutant.occurrence,
        start_pos=where,
        end_pos=(mutant.line, mutant.column + 1),
    )
    result = mutate_and_test([spec], command, seconds)
    outcome = result.test_outcome.value if result.test_outcome else "broken"
    if outcome == "incompetent":
        outcome = "broken"
    if outcome == "killed" and result.output == "timeout":
        outcome = "timeout"
    return Result(mutant=mutant, outcome=outcome, change=_change(result.diff or ""))


def _change(diff: str) -> str:
    """The lines that a mutant replaces and what it puts there, on one line."""
    sides: dict[str, list[str]] = {"-": [], "+": []}
    for line in diff.splitlines():
        if line[:1] in sides and line[:3] not in ("---", "+++") and line[1:].strip():
            sides[line[0]].append(line[1:].strip())
    before, after = (" ".join(lines) for lines in sides.values())
    return f"{before}  ->  {after or '(removed)'}"


def _copies(folder: Path, jobs: int) -> list[str]:
    copies = []
    for job in range(jobs):
        copy = folder / f"copy{job}"
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.nb?"))
            elif source.exists():
                shutil.copy(source, copy / name)
        copies.append(str(copy))
    return copies


def _timed(command: Sequence[str], folder: str) -> float:
    """Seconds that the tests take on the module as it is. Raises `CannotScoreError` when they fail."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotScoreError(f"the tests fail without any mutation:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return time.perf_counter() - began


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="path of the module, such as memplan/core/validate.py")
    parser.add_argument("--tests", help="which tests judge it, separated by commas; else by the module's name")
    parser.add_argument("--share", type=float, default=1.0, help="share of the mutants to try, drawn at random")
    parser.add_argument("--most", type=int, help="most mutants to try, drawn at random")
    parser.add_argument("--lines", help="only mutants of these lines: 30-90")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 2), help="how many run at once")
    parser.add_argument("--least", type=float, default=0.0, help="exit 1 below this score, in percent")
    return parser.parse_args(argv)


def _sample(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    if options.lines:
        first, _, last = options.lines.partition("-")
        mutants = [m for m in mutants if int(first) <= m.line <= int(last or first)]
    count = min(round(len(mutants) * options.share), options.most or len(mutants))
    drawn = random.Random(options.seed).sample(range(len(mutants)), count)
    return [mutants[i] for i in sorted(drawn)]


def main(argv: Sequence[str] | None = None) -> int:
    """Mutate, test, print. Returns the exit status."""
    options = _options(argv)
    try:
        return _print(_results(options), options.least)
    except CannotScoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _module(given: str) -> str:
    """The path of a module of the package from the root of the checkout on. Raises `CannotScoreError` for others."""
    path = Path(given).resolve()
    if not path.is_file() or path.suffix != ".py" or not path.is_relative_to(ROOT / "memplan"):
        raise CannotScoreError(
            f"{given} is no module of {ROOT / 'memplan'}: name one, such as memplan/core/validate.py"
        )
    return path.relative_to(ROOT).as_posix()


def _results(options: argparse.Namespace) -> list[Result]:
    """What becomes of the mutants that the options ask for. Raises `CannotScoreError` where none can be tried."""
    module = _module(options.module)
    tests = tuple(options.tests.split(",")) if options.tests else tests_of(module)
    if importlib.util.find_spec("cosmic_ray") is None:
        raise CannotScoreError("cosmic-ray is not installed, which makes the mutants: pip install -e '.[mutation]'")
    pytest = (sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0")
    command = (*pytest, *tests)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    if module.startswith(_PLAIN):
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ.pop("PYTHONPATH", None)  # the copy's own modules, not the checkout's
    everything = mutants_of(ROOT / module)
    chosen = _sample(everything, options)
    with tempfile.TemporaryDirectory(prefix="memplan-mutate-") as folder:
        copies = _copies(Path(folder), options.jobs)
        taken = Path(folder, "taken")
        taken.mkdir()
        os.environ["NUMBA_CACHE_DIR"] = str(Path(folder, "kernels"))
        seconds = _timed(command, copies[0])
        print(f"{module}: {len(chosen)} of {len(everything)} mutants, judged by {' '.join(tests)} ({seconds:.1f} s)")
        limit = max(_SLACK * seconds, _LEAST_SECONDS)
        with ProcessPoolExecutor(options.jobs, initializer=_enter, initargs=(copies, str(taken))) as pool:
            waiting = [pool.submit(_judge, module, mutant, " ".join(command), limit) for mutant in chosen]
            return [one.result() for one in waiting]


def _print(results: Sequence[Result], least: float) -> int:
    counts = {o: sum(r.outcome == o for r in results) for o in ("killed", "survived", "timeout", "broken")}
    for result in results:
        if result.outcome in ("survived", "broken"):
            print(f"  {result.outcome} line {result.mutant.line}: {result.change}")
    judged = counts["killed"] + counts["timeout"] + counts["survived"]
    score = 100 * (counts["killed"] + counts["timeout"]) / judged if judged else 100.0
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f": {score:.1f} % killed")
    return int(score < least)


if __name__ == "__main__":
    sys.exit(main())
