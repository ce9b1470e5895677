"""Trainer ranks, of which the last one gets no more than 32 MB beyond what it has when step STARVED_STEP begins."""

import os
import resource

import psutil

from dora.trainer import main
from dora.trainer.step import Trainer

STARVED_BYTES = 2**25


class StarvedTrainer(Trainer):
    def train(self, batch):
        is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last_rank and (batch.step, batch.index) == (int(os.environ.get("STARVED_STEP", "0")), 0):
            limit = psutil.Process().memory_info().vms + STARVED_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        super().train(batch)


main.Trainer = StarvedTrainer
main.main()
