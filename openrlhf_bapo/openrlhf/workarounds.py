"""Faults of OpenRLHF 0.11.2 and vLLM 0.29 that we work around, one function per fault."""

import functools
import multiprocessing
import os
import socket
import threading
from types import ModuleType

import torch


def hold_the_ranks_port(launcher: ModuleType) -> None:
    """Keep the port at which a model's ranks are to meet bound until they do.

    OpenRLHF lets go of it when the first rank starts; in the half minute until the ranks meet there, any connection of
    the machine may be given it, and the run ends with "address already in use".
    """
    held = []

    def get_free_port() -> int:
        held.append(port := socket.socket())
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store does so too, and may listen there
        port.bind(("", 0))
        return port.getsockname()[1]

    launcher.BaseDistributedActor._get_free_port = staticmethod(get_free_port)


def shuffle_by_step(ray_actors: ModuleType) -> None:
    """With `--train.full_determinism_enable`, let the order in which a model's samples make micro-batches follow from
    the seed and the optimizer steps so far.

    OpenRLHF's is drawn from the process's random numbers, which begin anew when a run is resumed.
    """
    model = ray_actors.__name__.rpartition("_")[2]
    trainer = getattr(ray_actors, f"{model.title()}PPOTrainer")
    upstream = trainer.ppo_train

    @functools.wraps(upstream)
    def ppo_train(self, *args, **kwargs) -> dict:
        if self.args.train.full_determinism_enable:
            engine = self.actor.model if model == "actor" else self.critic
            torch.manual_seed(self.args.train.seed + engine.global_steps)
        return upstream(self, *args, **kwargs)

    trainer.ppo_train = ppo_train


def accumulate_dynamic_batches(deepspeed_strategy: ModuleType) -> None:
    """Let every micro-batch of a dynamic batch count.

    OpenRLHF tells DeepSpeed that one micro-batch makes an optimizer step, then runs several backward passes before it
    steps: ZeRO-1 and 2 overwrite, and only the last one's gradient is left. With DeepSpeed's own counting off,
    backward adds up until `step()` is called.
    """
    strategy = deepspeed_strategy.DeepspeedStrategy
    upstream = strategy.get_ds_train_config

    @functools.wraps(upstream)
    def get_ds_train_config(self, *args, **kwargs) -> dict:
        config = upstream(self, *args, **kwargs)
        if self.use_dynamic_batch:
            config["managed_gradient_accumulation"] = False
        return config

    strategy.get_ds_train_config = get_ds_train_config


def end_with_the_actor(_: ModuleType) -> None:
    """Let an engine's process end when the Ray actor that started it is gone, however that happened, and not before.

    vLLM 0.29's would go on without it and keep its memory (its issue 55510), and end at a terminal's Ctrl-C, which
    Ray's own processes leave to the command.
    """
    actor = multiprocessing.parent_process()
    if actor is None or "RAY_JOB_ID" not in os.environ:
        return  # no process that Ray's worker started through multiprocessing
    os.setpgid(0, 0)

    def watch() -> None:
        actor.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
