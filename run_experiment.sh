#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a named experiment on a patched verl: finds a Python and hands over to lab/experiments/.
# `./run_experiment.sh --help` says what it takes; `./run_experiment.sh demo` needs nothing.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

# One that is old enough to lack what we use would fail with a traceback: ask before.
runs_here() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

if [[ -n ${PYTHON-} ]]; then
    candidates=("$PYTHON")
else
    candidates=(python3 python3.12 python3.11 python3.10 python)
fi
for candidate in "${candidates[@]}"; do
    if runs_here "$candidate"; then
        exec "$candidate" "$HERE/lab/experiments" "$@"
    fi
done
if [[ -n ${PYTHON-} ]]; then
    echo "run_experiment.sh: PYTHON=$PYTHON is not a Python 3.10 or newer that runs here: set PYTHON to one, or unset it." >&2
else
    echo "run_experiment.sh: no Python 3.10 or newer found (tried ${candidates[*]}): install one, or set PYTHON to it." >&2
fi
exit 1
