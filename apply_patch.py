#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts GradLoc on a verl checkout, or takes it off: ``python apply_patch.py --repo VERL``."""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - this is what says so
    sys.exit("apply_patch.py needs Python 3.10 or newer; this is " + sys.version.split()[0])
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # Python leaves it out under -I, -P, PYTHONSAFEPATH
from patchkit.apply import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
