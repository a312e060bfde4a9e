#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds patches/ from gradloc/ and verl_overrides/, after taking a checkout's edits into it where one is named.
#
#   bash make_patch.sh                       build patches/ from its sources
#   bash make_patch.sh --check               build elsewhere and compare; writes nothing
#   bash make_patch.sh --repo CHECKOUT       take the edits of a patched checkout, then build
#   bash make_patch.sh --repo CHECKOUT --base REV --head REV --output FILE
#                                            write a patch of that checkout to FILE instead
#   bash make_patch.sh --help                all options
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m patchkit.build.cli "$@"
