set -e
cd /work/wt-move; git reset -q --hard; git checkout -q -B rooms ${1:-main} && git clean -fdq && python /tmp/move/move.py && (/work/main/.venv/bin/ruff check --fix -q . >/tmp/move/ruff.txt || true) && (/work/main/.venv/bin/ruff format -q . || true) && git add -A && git commit -qm "Move modules into rooms (by script)"
python /tmp/move/rename.py && (/work/main/.venv/bin/ruff check --fix -q . >/tmp/move/ruff2.txt || true) && (/work/main/.venv/bin/ruff format -q . || true) && git add -A && git commit -qm "Rename identifiers to the field's terms (by script)"
find memplan tests -name __pycache__ -prune -exec rm -rf {} + ; find memplan tests -type d -empty -delete
python /tmp/move/post.py && (/work/main/.venv/bin/ruff check --fix -q . >/tmp/move/ruff3.txt || true) && (/work/main/.venv/bin/ruff format -q . || true) && git add -A && git commit -qm "Plan is data: making and checking it moves to planning/; rooms say what comes in and goes out"
/work/main/.venv/bin/python /tmp/move/gen_linter.py; cp /tmp/move/importlinter .importlinter; git add -A; git commit -q --amend --no-edit
