# SPDX-License-Identifier: Apache-2.0
"""Every row of the bad-input table (71 of them) is a test that carries its number."""

import re
from pathlib import Path

ROWS = 71


def test_every_row_of_the_bad_input_table_has_a_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = {int(number) for number in re.findall(r"def test_row_(\d+)_", text)}
    named |= {int(number) for number in re.findall(r'"(\d{1,2})-[a-z]', text)}
    named |= {71} if '"net-' in text else set()
    assert set(range(1, ROWS + 1)) <= named, set(range(1, ROWS + 1)) - named
