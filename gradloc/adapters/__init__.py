# SPDX-License-Identifier: Apache-2.0
"""One adapter for each trainer: the only rooms that know one. None imports another, but ``verl_common``."""
