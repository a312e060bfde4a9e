#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the site of docs/ into build/site, strictly: a page without its place in the menu, a link or an anchor that
# leads nowhere is an error, and so is anything that a reader's browser would fetch from elsewhere.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

venv=.gradloc/venv-docs
wanted=$(sha256sum <requirements/docs.txt)
if [[ $(cat "$venv/requirements.sha256" 2>/dev/null) != "$wanted" ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -q -r requirements/docs.txt
    printf '%s\n' "$wanted" >"$venv/requirements.sha256"
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet
fetched=$(grep -rEoh --include='*.html' '<(script|img|iframe|source|link)[^>]* (src|href)="(https?:)?//[^"]*"' build/site || true)
if [[ -n $fetched ]]; then
    printf 'build/site would fetch from elsewhere:\n%s\n' "$fetched" >&2
    exit 1
fi
echo "build/site/index.html"
