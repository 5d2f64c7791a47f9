"""The command line. It starts without torch, which only planning a model imports.

In: arguments. Out: text on stdout, files and an exit code: 0 success, 1 a limit is exceeded or no placement fits, 2
bad input (explained on stderr, without a traceback), 3 a bug in memplan (with a traceback), 130 interrupted. Start at
`main`, then `report.py`; `source.py` turns a model or a file into a plan, `console.py` has what commands print with and
the options that they share, `outputs.py` what they write. A command is in the file of its name, but for `diff` and
`explain`, which are in `compare.py`.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from memplan.cli import budget, check, compare, demo, doctor, fits, help, report, solve
from memplan.cli.console import INTERRUPTED, Interrupts, Settings, error_console, show_error, tolerate_encodings
from memplan.errors import MemplanError

HELP = """Plan the memory of PyTorch models ahead of time: every tensor at a fixed address in one arena, known before
anything runs.

A MODEL is named FILE.py:FACTORY or package.module:FACTORY, where FACTORY() returns (model, example_inputs).
A PLAN is a file written by `memplan report MODEL --save plan.json` or by plan.save("plan.json").
"""
EPILOG = "\n\n".join((
    "[bold]Examples[/bold]",
    "memplan report model.py:gpt2 --html a.html     what a step needs, and where every tensor lies",
    "memplan report model.py:gpt2 --save plan.json  keep the plan",
    "memplan check plan.json --max-arena 3GiB       fail a build that needs more",
    "memplan solve buffers.csv -o placed.csv        place buffers, without torch",
    "In CI: models, baseline and limits in pyproject.toml, \\[tool.memplan]; `memplan check --format github`.",
    "Exit codes: 0 success, 1 over a limit or nothing fits, 2 bad input, 3 a bug in memplan, 130 interrupted",
))  # fmt: skip

app = typer.Typer(
    name="memplan",
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (report.report, fits.fits, budget.budget, check.check, compare.diff, compare.explain, solve.solve):
    app.command(no_args_is_help=_command is not check.check)(_command)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command("help")(help.help_)


def _print_version(wanted: bool) -> None:
    if wanted:
        from memplan.version import __version__

        typer.echo(f"memplan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the Python traceback of an error.")] = False,
) -> None:
    context.ensure_object(Settings).traceback = traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv` (without the program's name) and return its exit code."""
    tolerate_encodings()
    settings, code = Settings(), 0
    with Interrupts() as interrupts:
        try:
            app(args=None if argv is None else list(argv), prog_name="memplan", obj=settings)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            if not interrupts.seen:  # else compiled code or a library turned the KeyboardInterrupt into this error
                code = _failed(error, settings)
        return INTERRUPTED if interrupts.seen else code


def _failed(error: Exception, settings: Settings) -> int:
    """Print the error and return its exit code."""
    known = isinstance(error, (MemplanError, OSError))
    if settings.traceback or not known:
        traceback.print_exception(error)
    if not known:
        error_console().print("this is a bug in memplan; please report it with the lines above", style="bold red")
        return 3
    if not isinstance(error, MemplanError):  # an OSError, such as a full disk or a missing folder, is no bug of memplan
        error = MemplanError(str(error), hint="check that the paths exist and can be written")
    show_error(error)
    return 2
