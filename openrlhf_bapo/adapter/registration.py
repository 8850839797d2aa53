"""Puts our classes into OpenRLHF's seams, in every process that loads OpenRLHF, as soon as it does.

OpenRLHF has no registry, but looks its parts up by module-level name at run time. A hook after the import of such a
module replaces the name. Nothing heavy is imported until OpenRLHF imports it itself.
"""

import functools
import importlib
import multiprocessing
import os
import socket
import threading
from types import ModuleType

import wrapt

WORKER_SETUP_HOOK = "openrlhf_bapo.adapter.registration.register"
"""For `ray.init(runtime_env={"worker_process_setup_hook": ...})`: Ray workers are processes of their own."""


@functools.cache
def register() -> None:
    """Register with OpenRLHF in this process; cheap, and a second call does nothing."""
    wrapt.register_post_import_hook(_hold_the_ranks_port, "openrlhf.trainer.ray.launcher")
    wrapt.register_post_import_hook(_use_actor_trainer, "openrlhf.trainer.ray.ppo_actor")
    for model in ("actor", "critic"):
        wrapt.register_post_import_hook(_shuffle_by_step, f"openrlhf.trainer.ray.ppo_{model}")
    wrapt.register_post_import_hook(_accumulate_dynamic_batches, "openrlhf.utils.deepspeed.deepspeed")
    wrapt.register_post_import_hook(_use_experience, "openrlhf.trainer.ppo_utils.experience")
    wrapt.register_post_import_hook(_note_versions, "openrlhf.trainer.ray.vllm_engine")
    wrapt.register_post_import_hook(_use_reward_calls, "openrlhf.utils.agent")
    for trainer in ("openrlhf.trainer.ppo_trainer", "openrlhf.trainer.ppo_trainer_async"):
        wrapt.register_post_import_hook(_use_off_policy_parts, trainer)
    wrapt.register_post_import_hook(_evaluate_at_start, "openrlhf.trainer.ppo_trainer")
    wrapt.register_post_import_hook(_end_with_the_actor, "vllm.v1.engine.core")


def _hold_the_ranks_port(launcher: ModuleType) -> None:
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


def _use_actor_trainer(_: ModuleType) -> None:
    importlib.import_module("openrlhf_bapo.adapter.actor_trainer")  # puts itself in place


def _shuffle_by_step(ray_actors: ModuleType) -> None:
    """With `--train.full_determinism_enable`, let the order in which a model's samples make micro-batches follow from
    the seed and the optimizer steps so far.

    OpenRLHF's is drawn from the process's random numbers, which begin anew when a run is resumed.
    """
    model = ray_actors.__name__.rpartition("_")[2]
    trainer = getattr(ray_actors, f"{model.title()}PPOTrainer")
    upstream = trainer.ppo_train

    @functools.wraps(upstream)
    def ppo_train(self, *args, **kwargs) -> dict:
        import torch

        if self.args.train.full_determinism_enable:
            engine = self.actor.model if model == "actor" else self.critic
            torch.manual_seed(self.args.train.seed + engine.global_steps)
        return upstream(self, *args, **kwargs)

    trainer.ppo_train = ppo_train


def _use_experience(_: ModuleType) -> None:
    importlib.import_module("openrlhf_bapo.adapter.experience")  # puts itself in place


def _note_versions(vllm_engine: ModuleType) -> None:
    importlib.import_module("openrlhf_bapo.adapter.vllm_engine").note_versions(vllm_engine)


def _use_reward_calls(agent: ModuleType) -> None:
    importlib.import_module("openrlhf_bapo.adapter.reward_calls").use_reward_calls(agent)


def _use_off_policy_parts(trainer: ModuleType) -> None:
    importlib.import_module("openrlhf_bapo.adapter.trainer").use_off_policy_parts(trainer)


def _accumulate_dynamic_batches(deepspeed_strategy: ModuleType) -> None:
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


def _end_with_the_actor(_: ModuleType) -> None:
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


def _evaluate_at_start(ppo_trainer: ModuleType) -> None:
    """`--eval.at_start`: OpenRLHF's evaluation once more, before the first update of a new run.

    `fit` calls `init_checkpoint_states` first, when the engines still hold the weights that they were started with.
    """
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class  # the class behind Ray's actor class
    upstream = trainer.init_checkpoint_states

    @functools.wraps(upstream)
    def init_checkpoint_states(self) -> dict:
        states = upstream(self)
        if self.args.eval.at_start and states["global_step"] == 0 and self.eval_dataloader:
            sampling = {name: getattr(self.args.eval, name) for name in ("temperature", "n_samples_per_prompt")}
            self.evaluate(0, **self.generate_kwargs | sampling)
        return states

    trainer.init_checkpoint_states = init_checkpoint_states
