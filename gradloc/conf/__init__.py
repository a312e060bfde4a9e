# SPDX-License-Identifier: Apache-2.0
"""The settings as Hydra reads them: their defaults, the groups `+gradloc=...`, and where these are."""
