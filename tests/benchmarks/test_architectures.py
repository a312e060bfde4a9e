# SPDX-License-Identifier: Apache-2.0
"""The benchmark on transformers' models, on one of them."""

import pytest

from lab.benchmarks import architectures


@pytest.mark.full
def test_both_faults_are_named_in_a_model_and_the_run_stays_the_same():
    pytest.importorskip("transformers")
    assert architectures.measure("llama") == {
        "token": True,
        "observe_is_equal": True,
        "mask_is_off_by": 0.0,
        "learning_rate": True,
    }
