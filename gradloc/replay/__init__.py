# SPDX-License-Identifier: Apache-2.0
"""An event again, on one machine: ``python -m gradloc.replay``."""
