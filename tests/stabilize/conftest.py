# SPDX-License-Identifier: Apache-2.0
"""The actor's configs, composed by Hydra."""

from tests.verl_actor.test_config import compose  # noqa: F401
