# SPDX-License-Identifier: Apache-2.0
"""Knights and Knaves: puzzles with exactly one solution, as text, as data sets and as a demo.

- `puzzle`      statements in a notation and in English; draws puzzles with exactly one solution
- `wording`     the published prompt and answer; a puzzle as a row of verl's parquet format
- `generate`    the command line: writes data sets, checks existing ones
- `language`, `summary`  the reduced task of `kk-demo`, and its table
"""
