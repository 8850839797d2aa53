"""A function on several ranks of a gloo group, each in a process forked off."""

import os

import pipeline
import torch
import torch.distributed as dist


def _rank(rank, world_size, port, results, function, args, kwargs):
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
        processes = [context.Process(target=_rank, args=(rank, *common)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * world_size
        return [results[rank] for rank in range(world_size)]
