"""Workarounds for faults of OpenRLHF 0.11.2 and vLLM 0.29, one function per fault."""

import importlib.util
import math
import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from openrlhf_bapo.openrlhf.registration import in_place_of


def hold_the_ranks_port(launcher: ModuleType) -> None:
    """Hold the port on which a model's ranks will meet, so that no other process takes it.

    OpenRLHF finds a free port and closes it when the first rank starts. The ranks bind it half a minute later. If
    another process takes the port in between, the run ends with "address already in use".
    """
    held = []

    def get_free_port() -> int:
        held.append(port := socket.socket())
        # torch's store sets this option too. Together they let the store listen on this port.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("", 0))
        return port.getsockname()[1]

    launcher.BaseDistributedActor._get_free_port = staticmethod(get_free_port)


def shuffle_by_step(ray_actors: ModuleType) -> None:
    """Derive the order of a model's samples from seed and optimizer steps (`--train.full_determinism_enable`).

    OpenRLHF draws the order from the process's random numbers, which start again when a run is resumed.
    """
    model = ray_actors.__name__.rpartition("_")[2]
    trainer = getattr(ray_actors, f"{model.title()}PPOTrainer")

    @in_place_of(trainer, "ppo_train")
    def ppo_train(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> dict:
        if self.args.train.full_determinism_enable:
            engine = self.actor.model if model == "actor" else self.critic
            torch.manual_seed(self.args.train.seed + engine.global_steps)
        return upstream(self, *args, **kwargs)


def know_fp32(utils: Any) -> None:
    """Let `--ds.param_dtype fp32` load models in float32. DeepSpeed computes in it where bf16 and fp16 are off."""

    @in_place_of(utils, "convert_to_torch_dtype")
    def convert_to_torch_dtype(upstream: Any, param_dtype: str) -> torch.dtype:
        return torch.float32 if param_dtype == "fp32" else upstream(param_dtype)


def accumulate_dynamic_batches(deepspeed_strategy: ModuleType) -> None:
    """Accumulate the gradients of all micro-batches of a dynamic batch.

    OpenRLHF tells DeepSpeed that an optimizer step has one micro-batch, but runs several backward passes before it
    steps. ZeRO-1 and 2 then keep the gradient of the last one only. With DeepSpeed's own counting turned off, gradients
    add up until `step()` is called. The other stages do so anyway.
    """

    @in_place_of(deepspeed_strategy.DeepspeedStrategy, "get_ds_train_config")
    def get_ds_train_config(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> dict:
        config = upstream(self, *args, **kwargs)
        if self.use_dynamic_batch and self.stage in (1, 2):
            config["managed_gradient_accumulation"] = False
        return config


def resume_with_the_given_settings(deepspeed_strategy: ModuleType) -> None:
    """Let a resumed run train with its own learning rate, betas, epsilon, momentum and weight decay.

    DeepSpeed restores those of the run that wrote the checkpoint, so that OpenRLHF ignores the flags.
    """

    @in_place_of(deepspeed_strategy.DeepspeedStrategy, "load_ckpt")
    def load_ckpt(upstream: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> tuple:
        names = ("betas", "eps", "momentum", "weight_decay")
        given = [{name: group[name] for name in names if name in group} for group in model.optimizer.param_groups]
        scheduler, base_lrs = model.lr_scheduler, model.lr_scheduler.base_lrs
        loaded = upstream(self, model, *args, **kwargs)
        scheduler.base_lrs = base_lrs
        # The schedule goes on from the checkpoint's step.
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler._last_lr = [lr * factor for lr, factor in zip(base_lrs, factors, strict=True)]
        for group, settings, lr in zip(model.optimizer.param_groups, given, scheduler._last_lr, strict=True):
            group.update(settings, lr=lr)
        return loaded


def average_in_float32(deepspeed_strategy: ModuleType) -> None:
    """Keep the averaged weights (`--train.enable_ema`) in float32, and round them to the model's type.

    OpenRLHF averages in the model's type. In bf16 the step of an update, 0.8% of the distance by default, rounds to
    nothing, so that the average, which is the saved model, keeps most of its initial weights.
    """

    @in_place_of(deepspeed_strategy.DeepspeedStrategy, "moving_average")
    def moving_average(upstream: Any, self: Any, model: Any, model_ema: Any, *args: Any) -> None:
        averages = averaged_weights(model_ema)

        def weights() -> Iterator[SimpleNamespace]:
            for weight in model.parameters():
                yield SimpleNamespace(requires_grad=weight.requires_grad, data=weight.data.float())

        upstream(self, SimpleNamespace(parameters=weights), SimpleNamespace(parameters=lambda: averages), *args)
        set_averaged_weights(model_ema, averages)


def averaged_weights(model_ema: Any) -> list[torch.Tensor]:
    """Return the averages in float32, one per parameter; they begin as the model's weights."""
    if not hasattr(model_ema, "averages"):
        model_ema.averages = [weight.data.float() for weight in model_ema.parameters()]
    return model_ema.averages


def set_averaged_weights(model_ema: Any, averages: list[torch.Tensor]) -> None:
    """Set the averages, and the model's weights to them."""
    for average, given, weight in zip(averaged_weights(model_ema), averages, model_ema.parameters(), strict=True):
        average.copy_(given)
        weight.data.copy_(average)


def train_without_a_compiler(deepspeed_strategy: ModuleType) -> None:
    """Let torch's AdamW train on GPUs for which DeepSpeed cannot compile its own. Both compute the same.

    DeepSpeed compiles it at first use, and needs nvcc and CUDA's headers for that.
    """

    @in_place_of(deepspeed_strategy.DeepspeedStrategy, "get_ds_train_config")
    def get_ds_train_config(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> dict:
        config = upstream(self, *args, **kwargs)
        if torch.cuda.is_available() and not self.adam_offload:
            choose_adam(config)
        return config


def choose_adam(config: dict) -> None:
    """Set `torch_adam` in a DeepSpeed configuration with AdamW, and print why, if DeepSpeed's cannot be compiled."""
    if config.get("optimizer", {}).get("type") != "AdamW":
        return
    try:
        compile_adam()
    except Exception as error:  # torch and DeepSpeed raise many kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"openrlhf-bapo: torch's AdamW trains, because DeepSpeed's cannot be compiled ({cause})", flush=True)
        config["optimizer"]["params"]["torch_adam"] = True


def compile_adam() -> None:
    """Let DeepSpeed compile its AdamW for GPUs, or load it if that was done before. Raises what DeepSpeed raises.

    DeepSpeed 0.19 ends at architectures such as "9.0a" in TORCH_CUDA_ARCH_LIST (its pull request 8619). AdamW needs
    none of their features, so this process has the variable without the letters.
    """
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

    if architectures := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[a-z]", "", architectures)
    FusedAdamBuilder().load(verbose=False)


def sample_without_flashinfer(_: ModuleType) -> None:
    """Let vLLM's engines sample without the package flashinfer where it is not installed.

    vLLM 0.29 imports it for its sampler on a GPU, also if no request needs it, and the engine does not start.
    """
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def plan_steps_for_all_samples(replay_buffer: ModuleType) -> None:
    """Lift dynamic batch's cap on the optimizer steps of actor and critic, which OpenRLHF computes from fresh samples.

    Its other cap stays: the number of samples in the buffer.
    """

    @in_place_of(replay_buffer.NaiveReplayBuffer, "setup_dynamic_batch")
    def setup_dynamic_batch(upstream: Any, self: Any, strategy: Any) -> None:
        planned = strategy.args.rollout.batch_size
        strategy.args.rollout.batch_size = planned * (1 + math.ceil(strategy.args.replay.ratio))
        try:
            upstream(self, strategy)
        finally:
            strategy.args.rollout.batch_size = planned


def end_with_the_actor(_: ModuleType) -> None:
    """End an engine's process when the Ray actor that started it has ended for any reason, and not before.

    Otherwise vLLM 0.29's engine process continues without the actor and keeps its memory (vLLM's issue 55510). It also
    ends at a terminal's Ctrl-C, which Ray's own processes leave to the command.
    """
    actor = multiprocessing.parent_process()
    if actor is None or "RAY_JOB_ID" not in os.environ:
        return  # this process was not started by a Ray worker through multiprocessing
    os.setpgid(0, 0)

    def watch() -> None:
        actor.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
