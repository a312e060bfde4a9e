#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds dist/gradloc-VERSION: a wheel and an sdist, without a network, and tries the wheel in an environment of its own.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.gradloc/venv/bin/python} # one with hatchling (requirements/test.txt)
rm -rf dist
"$python" -m hatchling build -d dist
tried=$(mktemp -d)
trap 'rm -rf "$tried"' EXIT
"$python" -m venv --without-pip "$tried"
"$python" -m pip --python "$tried/bin/python" install --disable-pip-version-check -q --no-deps --no-index dist/*.whl
(cd "$tried" && bin/python -c 'import gradloc; print("gradloc", gradloc.__version__, "imports")')
ls -l dist
