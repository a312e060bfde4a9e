# SPDX-License-Identifier: Apache-2.0
"""The analysis by quartile on the trainer's side: sample tokens, ask the workers, write the record."""

import time

import torch

from ...record import analysis
from ..actor import BUCKET_KEY, NUM_SAMPLED_KEY
from ..config import QuartileSettings
from ..reporter import AnalysisBatch, Reporter
from .probe import QUARTILE_KEY, SAMPLE_KEY
from .record import measured, quartile_metrics
from .split import assign, sample_tokens


class QuartileReporter(Reporter):
    """Splits the gradient that the batch is about to cause by the tokens' probability."""

    name = prefix = "quartile_analysis"
    settings: QuartileSettings

    def analyse(self, batch: AnalysisBatch, global_step: int) -> dict[str, float]:
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
        ranks = batch.ask(tensors, {NUM_SAMPLED_KEY: len(sampled)})
        record = analysis.QuartileAnalysis(
            split=self.settings.split,
            num_rows=len(quartiles),
            **measured(ranks, arrays, quartiles, sampled),
            **self._about(global_step, ranks[0], start),
        )
        return self._write(record, quartile_metrics(record)).metrics
