# SPDX-License-Identifier: Apache-2.0
"""The tools behind ``apply_patch.py``, ``gradloc-patch`` and ``make_patch.sh``.

The applier trusts one thing only: the content of a file before and after. It needs a bare Python 3.10 and nothing
else. The builder also calls git. Nothing here imports torch or verl.
"""

import os

if os.name == "nt":
    raise SystemExit("this needs Linux or macOS, as verl does; on Windows, run it in WSL")
