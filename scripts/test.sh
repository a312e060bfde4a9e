#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the checks and the default test suite from a fresh clone: makes the environment it needs under
# .gradloc/, kept between runs. Arguments go to pytest: `scripts/test.sh -k applier -x`.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

stage_started=$SECONDS
stage() { printf '== %s (%d s for the last stage)\n' "$1" $((SECONDS - stage_started)); stage_started=$SECONDS; }

stage "environment"
python=$("${PYTHON:-python3}" -c '
import sys
from experiments.cpu.environment import ensure_python
print(ensure_python(report=lambda *words: print(*words, file=sys.stderr)))')
bin=$(dirname -- "$python")
stamp=.gradloc/test-requirements.sha256
wanted=$(cat requirements/*.txt | sha256sum)
if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" || $("$python" -c 'import pytest; print(1)' 2>/dev/null) != 1 ]]; then
    files=()
    for file in requirements/*.txt; do files+=(-r "$file"); done
    "$python" -m pip install --disable-pip-version-check --no-input -q "${files[@]}"
    printf '%s\n' "$wanted" >"$stamp"
fi

stage "lint"
"$bin/ruff" check .
"$bin/ruff" format --check -q .
git ls-files -z '*.sh' .ci/run | xargs -0 "$bin/shellcheck"
bash make_patch.sh --check

stage "tests"
"$python" -m pytest -m "not slow and not browser" --durations=15 "$@"
stage "done"
