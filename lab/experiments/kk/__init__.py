# SPDX-License-Identifier: Apache-2.0
"""Knights and Knaves: puzzles with exactly one solution, as text, as parquet files, as a demo.

- `puzzle`      what people say, in a notation and in English; drawing puzzles with exactly one solution
- `wording`     the published prompt and answer; a puzzle as a row of verl's parquet format
- `generate`    the command line: writes data sets, checks existing ones
- `language`, `summary`  the reduced task of `kk-demo`, and the table it ends with
"""
