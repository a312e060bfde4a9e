# SPDX-License-Identifier: Apache-2.0
"""The code of apply_patch.py and make_patch.sh. Needs only Python 3.10, and requests for a URL."""

import os

if os.name == "nt":
    raise SystemExit("this needs Linux or macOS, as verl does; on Windows, run it in WSL")
