#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the checks and the tests from a fresh clone: makes the environment that they need under .gradloc/,
# kept between runs. The rest of the arguments goes to pytest: `scripts/test.sh quick -k applier -x`.
#
#   scripts/test.sh            lint, and all default tests
#   scripts/test.sh lint       ruff, its format, shellcheck, types, and that patches/ is what its sources say
#   scripts/test.sh quick      the quick ones of the tests that need neither verl nor Ray
#   scripts/test.sh slow       the others: more layouts and arms, benchmarks, real runs
#   scripts/test.sh browser    opens the report in headless Chromium
#   scripts/test.sh mutants    changes the code in many places and counts what the tests do not notice; --help says more
#   scripts/test.sh trl        the tests on TRL, in their own environment
#   scripts/test.sh trainers   other trainers by their own commands, each in an environment of its own
#   scripts/test.sh newest     tests/watch and tests/recipes on the newest torch, transformers and accelerate
#   scripts/test.sh megatron   a loop of Megatron's own on the newest megatron-core
#   scripts/test.sh verl09     the tests on verl 0.9, in an environment of their own; those that take longer: verl09 -m slow
#   scripts/test.sh verl09 --environment    makes that environment, and tests nothing
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

tier=default
case "${1:-}" in lint | quick | slow | browser | mutants | verl09 | trl | trainers | megatron | newest) tier=$1; shift ;; esac

unset PYTHONDONTWRITEBYTECODE # the tests start some hundred processes
stage_started=$SECONDS
stage() { printf '== %s (%d s for the last stage)\n' "$1" $((SECONDS - stage_started)); stage_started=$SECONDS; }

if [[ $tier == verl09 || $tier == trl || $tier == trainers || $tier == megatron ]]; then
    environment=${tier^^}
    [[ $tier != trainers ]] || environment=DEEPSPEED
    [[ $tier != megatron ]] || environment=VERL09
    files=("requirements/${environment,,}.txt" requirements/test.txt)
    packages=(-c requirements/test.txt jsonschema pytest pytest-xdist)
else
    environment=DEMO
    files=(requirements/demo.txt requirements/report.txt requirements/test.txt) # trackers.txt is for an environment of its own
    packages=()
    for file in "${files[@]}"; do packages+=(-r "$file"); done
fi

if [[ $tier == newest ]]; then # made anew each time: what is newest changes
    newest=.gradloc/venv-newest
    stage "environment" && rm -rf "$newest" && "${PYTHON:-python3}" -m venv "$newest"
    "$newest/bin/python" -m pip install --disable-pip-version-check --no-input -q torch
    "$newest/bin/python" -m pip install --disable-pip-version-check --no-input -q transformers accelerate peft lightning \
        jinja2 matplotlib rich pytest pytest-xdist jsonschema
    "$newest/bin/python" -m pip list --format freeze | grep -E '^(torch|transformers|accelerate|peft|lightning)=='
    stage "tests on the newest"
    PYTHONPATH=. "$newest/bin/python" -m pytest -n 2 --dist loadgroup -o faulthandler_timeout=900 -m "not slow and not browser" \
        tests/watch tests/recipes --deselect tests/watch/test_price.py "$@"
    exit
fi

stage "environment"
python=$("${PYTHON:-python3}" -c '
import sys
from lab.experiments import environment
print(environment.ensure_python(getattr(environment, sys.argv[1])))' "$environment")
bin=$(dirname -- "$python")
stamp=$bin/../test-requirements.sha256
wanted=$({ cat "${files[@]}" && echo "${packages[@]}"; } | sha256sum)
if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    "$python" -m pip install --no-compile --disable-pip-version-check --no-input -q "${packages[@]}"
    printf '%s\n' "$wanted" >"$stamp"
fi

if [[ ${1:-} == --environment ]]; then
    exit # which the others then find
fi

lint() {
    "$bin/ruff" check .
    "$bin/ruff" format --check -q .
    git ls-files -z '*.sh' .ci/run | xargs -0 "$bin/shellcheck"
    "$bin/mypy"
    PYTHON=$python bash make_patch.sh --check
}

# Two processes: a third takes longer to import all than it saves. conftest.py says which tests have to stay in one, and which begin. The ten
# slowest come last. A test that hangs fails after LONGEST seconds, with its traceback; the others continue.
tests() {
    "$python" -m pytest -n "${WORKERS:-2}" --dist loadgroup --no-loadscope-reorder --durations=10 \
        -o faulthandler_timeout="${LONGEST:-900}" -o faulthandler_exit_on_timeout=true -m "$1" "${@:2}"
}
case $tier in
    lint) stage "lint" && lint ;;
    default)
        stage "tests, and lint in parallel"
        said=$(mktemp)
        lint >"$said" 2>&1 &
        is_bad=0
        tests "not slow and not browser and not verl09" "$@" || is_bad=$?
        wait $! || is_bad=$?
        stage "lint" && cat "$said" && rm "$said"
        ((is_bad == 0)) || exit "$is_bad"
        ;;
    quick) stage "quick tests" && tests "not full and not slow and not browser and not verl09" "$@" ;;
    slow) stage "slow tests" && LONGEST=7200 tests "slow and not browser and not verl09" "$@" ;;
    browser) stage "browser tests" && "$python" -m pytest -m browser "$@" ;;
    mutants) stage "mutants" && "$python" scripts/mutants "$@" ;;
    trainers) stage "tests on other trainers" && GRADLOC_TRAINERS=1 "$python" -m pytest tests/recipes "$@" ;;
    megatron)
        newest=.gradloc/megatron-newest
        stage "megatron-core" && rm -rf "$newest"
        "$python" -m pip install --no-deps --ignore-requires-python --disable-pip-version-check --no-input -q \
            --target "$newest" -r requirements/megatron-newest.txt
        stage "tests on it" && PYTHONPATH="$newest:." "$python" -m pytest tests/recipes/test_{ranks,megatron}.py "$@"
        ;;
    trl | verl09) # a second `-m` is for the rest: `-m slow`
        shared=(tests/adapters/conformance)
        if [[ $tier == verl09 ]]; then # features that work there, too
            shared+=(tests/analysis/test_split.py tests/reweighting/test_stages.py)
            shared+=(tests/stabilize/{test_actor,test_ratios}.py tests/recipes/test_{ranks,megatron}.py)
        fi
        stage "tests on $tier" && LONGEST=2400 tests "not slow" "tests/adapters/$tier" "${shared[@]}" "$@"
        ;;
esac
stage "done"
