# SPDX-License-Identifier: Apache-2.0
"""The tools behind ``apply_patch.py`` and ``make_patch.sh``.

The applier trusts one thing only: the digest of a file's bytes before and after. It needs a bare
Python 3.10 and nothing else; ``requests`` is imported late, for downloads alone. The builder
(``build``, ``regenerate``) also calls git. Nothing here imports torch or verl.
"""

import os

if os.name == "nt":
    raise SystemExit("this needs Linux or macOS, as verl does; on Windows, run it in WSL")

BASE_COMMIT = "f9c855f7cf04d603c9546bc01776c74806a879c1"
"""The verl commit that the patch is made for: tag v0.7.0."""

BASE_VERSIONS = ("0.7.0", "0.7.0.dev")
"""What ``verl/version/version`` says in the released package, and at that commit."""
