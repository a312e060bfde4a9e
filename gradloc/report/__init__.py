# SPDX-License-Identifier: Apache-2.0
"""Reads a run's events and logs, and shows them.

Runs on a laptop over a copied folder: this package imports neither torch nor verl.
"""

from .. import __version__ as __version__
