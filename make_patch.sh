#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds patches/ from gradloc/ and verl_overrides/, after taking a checkout's edits into them where one is named.
#
#   bash make_patch.sh                       build patches/ from its sources
#   bash make_patch.sh --check               build elsewhere and compare; writes nothing
#   bash make_patch.sh --repo CHECKOUT       take the edits of a patched checkout, then build
#   bash make_patch.sh --repo CHECKOUT --base REV --head REV --output FILE
#                                            write a patch of that checkout to FILE instead
#   bash make_patch.sh --drift VERL          which seams still fit that tree, and which lines moved
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
