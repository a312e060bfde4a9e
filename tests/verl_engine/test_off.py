# SPDX-License-Identifier: Apache-2.0
"""Without a flag, an installed GradLoc is not there."""

from .test_localization import PLANT


def test_without_the_flag_a_run_is_verls_own_also_through_a_spike(train):
    stock, off = train(stock=True, plants=(PLANT,)), train(plants=(PLANT,))
    for one, other in zip(stock, off, strict=True):
        assert one["norms"] == other["norms"]
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    assert not [name for name in off[0]["metrics"] if "gradloc" in name]
