# SPDX-License-Identifier: Apache-2.0
"""``python -m gradloc.report`` is ``gradloc`` without installing it."""

import sys

from ..command import main

sys.exit(main())
