"""A function on several ranks of a gloo group, each in a process forked off."""

import os

import pipeline
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes


def _rank(rank, world_size, port, results, function, args, kwargs):
    # torch makes its thread pool again in a forked process. Two threads that are the first to ask for it may get none
    # ("Invalid thread pool!"), and transformers loads weights in threads.
    torch.set_num_threads(1)
    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    results[rank] = function(rank, *args, **kwargs)
    dist.destroy_process_group()


def on_ranks(world_size: int, function, *args, **kwargs) -> list:
    """A function's results by rank, each in a process forked off, for which nothing need be imported again."""
    context = torch.multiprocessing.get_context("fork")
    with context.Manager() as manager:
        results, port = manager.dict(), pipeline.free_port()
        common = world_size, port, results, function, args, kwargs
        # When a rank fails, this ends the others, and raises the error of the first.
        start_processes(_rank, common, world_size, start_method="fork")
        return [results[rank] for rank in range(world_size)]
