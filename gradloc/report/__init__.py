# SPDX-License-Identifier: Apache-2.0
"""Reads what a run's localized spikes left on disk, and shows it.

Runs on a laptop over a copied folder: this package imports neither torch nor verl.
"""

from .. import __version__ as __version__
