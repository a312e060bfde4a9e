# SPDX-License-Identifier: Apache-2.0
"""``python -m gradloc.report`` is ``gradloc``'s part that reads runs."""

import sys

from .cli import main

sys.exit(main())
