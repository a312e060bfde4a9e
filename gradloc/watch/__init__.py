# SPDX-License-Identifier: Apache-2.0
"""GradLoc in a training loop of one's own, see :class:`.watch.Watch`."""
