# SPDX-License-Identifier: Apache-2.0
"""The fingerprint knows the same weights under every sharding; tests/loop/test_fingerprint.py has the rest."""

import pytest

from gradloc.loop.fingerprint import differs
from gradloc.record.bundle import Fingerprint
from gradloc.record.reading import read


@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1", "fsdp1, original parameters"])
def test_sharding_does_not_change_it(prints, sharding):
    plain, sharded, other = (read(Fingerprint, prints[name]) for name in ("plain", sharding, "other"))
    assert differs(plain, sharded) is differs(sharded, plain) is None
    assert (sharded.parameters is None) == (sharding == "fsdp1")
    assert differs(sharded, other) is not None
