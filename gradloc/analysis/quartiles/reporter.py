# SPDX-License-Identifier: Apache-2.0
"""The analysis by quartile on the trainer's side: sample tokens, ask the workers, write what they found."""

import time
from dataclasses import replace

import torch

from ...record import analysis
from ..actor import BUCKET_KEY, NUM_SAMPLED_KEY
from ..config import QuartileSettings
from ..files import QUARTILES_FOLDER, write_record
from ..reporter import Batch, Reporter
from .probe import QUARTILE_KEY, SAMPLE_KEY
from .record import measured, quartile_metrics
from .split import assign, sample_tokens


class QuartileAnalysis(Reporter):
    """Splits the gradient that the batch is about to cause by the tokens' probability."""

    name = prefix = "quartile_analysis"
    settings: QuartileSettings

    def analyse(self, batch: Batch, global_step: int) -> dict[str, float]:
        start = time.perf_counter()
        arrays = {key: batch.tensors[key].float().numpy() for key in ("old_log_probs", "advantages")}
        arrays["responses"] = batch.tensors["responses"].numpy()
        mask = batch.tensors["response_mask"].bool().numpy()
        quartiles = assign(arrays["old_log_probs"], mask, self.settings.split)
        sampled = sample_tokens(quartiles, self.settings.num_tokens, self.about.seed + global_step)
        numbers = torch.full(quartiles.shape, -1)
        for number, (row, position) in enumerate(sampled.tolist()):
            numbers[row, position] = number
        tensors = {
            BUCKET_KEY: torch.zeros(len(quartiles), dtype=torch.long),
            QUARTILE_KEY: torch.from_numpy(quartiles),
            SAMPLE_KEY: numbers,
        }
        found = batch.ask(tensors, {NUM_SAMPLED_KEY: len(sampled)})
        record = analysis.QuartileAnalysis(
            **self._head(global_step, found[0]["terms"]),
            split=self.settings.split,
            num_rows=len(quartiles),
            **measured(found, arrays, quartiles, sampled),
            cost=self._cost(found[0], start),
        )
        record = replace(record, metrics=quartile_metrics(record))
        write_record(self.about.root, QUARTILES_FOLDER, record)
        return record.metrics
