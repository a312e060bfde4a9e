# SPDX-License-Identifier: Apache-2.0
"""``python -m gradloc_report`` is ``gradloc-report``."""

import sys

from gradloc_report.cli import main

sys.exit(main())
