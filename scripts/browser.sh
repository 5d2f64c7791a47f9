#!/usr/bin/env bash
# Sees to it that Chromium and its driver are there, for the tests of the pages: from the system's packages where that is
# possible. Where it is not, says so and succeeds: these tests are then skipped.
set -euo pipefail

have() { command -v "$1" >/dev/null 2>&1; }
found() { have chromedriver && { have chromium || have chromium-browser || have google-chrome; }; }

if found; then
    echo "browser: $(chromedriver --version | head -1)"
    exit 0
fi
root=()
if [[ "$(id -u)" != 0 ]]; then
    root=(sudo -n)
fi
if have apt-get && "${root[@]}" true 2>/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    echo "browser: installing Chromium from the system's packages ..." >&2
    {
        "${root[@]}" timeout 120 apt-get update -qq
        "${root[@]}" timeout 480 apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core
    } >/dev/null 2>&1 || true
fi
if found; then
    echo "browser: $(chromedriver --version | head -1)"
else
    echo "browser: no Chromium can be had here, so the tests of the pages in a browser are skipped"
fi
