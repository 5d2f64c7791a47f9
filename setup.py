"""Puts the pages of docs/ into the wheel, for `memplan help`; everything else is in pyproject.toml."""

from pathlib import Path
from shutil import copy

from setuptools import setup
from setuptools.command.build_py import build_py


class WithPages(build_py):
    def run(self) -> None:
        super().run()
        for page in [] if self.editable_mode else Path("docs").rglob("*.md"):
            to = Path(self.build_lib, "memplan", page)
            to.parent.mkdir(parents=True, exist_ok=True)
            copy(page, to)


setup(cmdclass={"build_py": WithPages})
