# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own trainer on CPUs: what its `--experimental.custom_import` takes, and its documents.

python -m tests.recipes.titan FOLDER    writes the documents
"""

LEARNED = 8
"""The step in which the watch begins: the model has learned to count by then."""
STEP, ROW = 5, 1
"""Which of the watched steps, and which of its rows, has the damaged document."""
