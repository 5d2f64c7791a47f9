#!/usr/bin/env bash
# Installs memplan and what its tests need into .venv, and runs the tests in a process more than there are cores, as some
# tests wait for processes of their own; each has its own part of the files, so that modules compile and share what they
# share once. Arguments go to pytest. Slow tests are left out (tests/slow.py): `scripts/test.sh -m slow` runs those, and
# `scripts/test.sh -m ""` all, as every night.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh torch,test
exec .venv/bin/python -m pytest --numprocesses "$(($(nproc) + 1))" --dist worksteal -m "not slow" --durations 30 --durations-min 5 "$@"
