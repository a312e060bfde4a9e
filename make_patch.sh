#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds patches/ from verl_overrides/.
#
#   bash make_patch.sh                       build
#   bash make_patch.sh --check               compare with what it would build; writes nothing
#   bash make_patch.sh --repo CHECKOUT       take the edits of a patched checkout into verl_overrides/, then build
#   bash make_patch.sh --help                all options
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# Not -m, which would look for modules in the current folder first.
exec "${PYTHON:-python3}" -c '
import sys
if sys.version_info < (3, 10):
    sys.exit("make_patch.sh needs Python 3.10 or newer; this is " + sys.version.split()[0] + " (PYTHON=... names another)")
sys.path[:] = [sys.argv.pop(1)] + [place for place in sys.path if place]
from patchkit.build import main
sys.exit(main())' "$here" "$@"
