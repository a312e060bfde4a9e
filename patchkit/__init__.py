# SPDX-License-Identifier: Apache-2.0
"""Holds the code of apply_patch.py and make_patch.sh. A bare Python 3.10 does; a URL needs requests."""

import os

if os.name == "nt":
    raise SystemExit("this needs Linux or macOS, as verl does; on Windows, run it in WSL")
