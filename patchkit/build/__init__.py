# SPDX-License-Identifier: Apache-2.0
"""What ``make_patch.sh`` does: takes a checkout's edits and builds ``patches/`` from their sources."""
