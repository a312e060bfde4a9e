# SPDX-License-Identifier: Apache-2.0
"""An event again, on one machine: ``python -m gradloc.replay`` (in a patched verl ``verl.gradloc.replay``)."""
