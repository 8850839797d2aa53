"""Records the weights that a run's actors publish, and the micro-batches that they train on.

Every Python process of a run with this folder on PYTHONPATH loads it. It hooks into OpenRLHF's own classes and counts
independently of our code. The folder RECORDING gets

    weights-N.pt         the weights of the N-th broadcast, by PEFT's names with LoRA, and empty at ZeRO-3
    actor-N-R-I.pt       the I-th micro-batch that rank R trained on, after N broadcasts: all tensors of the experience,
                         the inputs of the loss, the loss, its bounds, and the fraction of tokens that it clipped
    critic-N-R-I.pt      the same for the critic, without the loss

Broadcasts of a resumed run are counted from RECORDING_START. With RECORDING_MIXED, async training always publishes
weights while responses are under way. The tests need float32, to tell the log-probs of different versions apart.
"""

import functools
import glob
import itertools
import os
import queue
import types

import wrapt

FOLDER, START = os.environ["RECORDING"], int(os.environ["RECORDING_START"])


def _record(trainer: type, model: str) -> None:
    upstream = trainer.training_step
    num_recorded = itertools.count()

    @functools.wraps(upstream)
    def training_step(self, experience, *args, **kwargs):
        import torch

        record = {name: value for name, value in vars(experience).items() if isinstance(value, torch.Tensor)}

        def note(loss, inputs, outputs) -> None:
            record.update(zip(("log_probs", "denominators", "loss_advantages"), inputs, strict=True))
            bounds = {"lower": 1 - loss.clip_eps_low, "upper": 1 + loss.clip_eps_high}
            for name, value in {"loss": outputs[0], "clip_ratio": outputs[1], **bounds}.items():
                record[name] = torch.as_tensor(value).expand(len(record["sequences"]))

        if model == "actor":
            hook = self.actor_loss_fn.register_forward_hook(note)
        result = upstream(self, experience, *args, **kwargs)
        if model == "actor":
            hook.remove()
        broadcasts = len(glob.glob(f"{FOLDER}/weights-*.pt"))
        name = f"{model}-{START + broadcasts:03d}-{torch.distributed.get_rank()}-{next(num_recorded):05d}"
        torch.save({name: value.detach() for name, value in record.items()}, f"{FOLDER}/{name}.pt")
        return result

    trainer.training_step = training_step


def _record_actor(ppo_actor) -> None:
    _record(ppo_actor.ActorPPOTrainer, "actor")
    actor = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
    upstream = actor.broadcast_to_vllm
    version = itertools.count(START + 1)

    @functools.wraps(upstream)
    def broadcast_to_vllm(self) -> None:
        import torch

        upstream(self)
        if torch.distributed.get_rank() == 0:
            torch.save(self.actor.model.module.state_dict(), f"{FOLDER}/weights-{next(version):03d}.pt")

    actor.broadcast_to_vllm = broadcast_to_vllm


def _publish_amid_responses(trainer_async) -> None:
    """Make a rollout begin just before each broadcast, and the broadcast wait for its first requests."""
    generator = trainer_async.GenerateSamplesActor.__ray_metadata__.modified_class
    trainer = trainer_async.TrainingActor.__ray_metadata__.modified_class
    upstream_fit, upstream_init, upstream = generator.fit, trainer.__init__, trainer.broadcast_to_vllm
    all_generated = f"{FOLDER}/all-generated"  # no rollout begins after the last prompts

    class Slots(queue.SimpleQueue):
        def __init__(self, free_slots) -> None:
            self.free_slots = free_slots

        def put(self, slot, block: bool = True) -> None:
            if isinstance(slot, tuple):  # the last step, for which the generator waits
                self.free_slots.put(slot, block=block)
            else:
                super().put(slot)

    @functools.wraps(upstream_fit)
    def fit(self, *args, **kwargs) -> None:
        rollout_queue = self.rollout_queue

        def put(payload, block: bool) -> None:
            if isinstance(payload, str):  # the generator has made its last rollout
                open(all_generated, "w").close()
            rollout_queue.put(payload, block=block)

        self.rollout_queue = types.SimpleNamespace(put=put)
        upstream_fit(self, *args, **kwargs)

    @functools.wraps(upstream_init)
    def init(self, *args, **kwargs) -> None:
        upstream_init(self, *args, **kwargs)
        self.free_slots, self.rollout_slots = self.rollout_slots, Slots(self.rollout_slots)

    @functools.wraps(upstream)
    def broadcast_to_vllm(self) -> None:
        import ray

        self.free_slots.put(self.rollout_slots.get_nowait(), block=True)
        while not os.path.exists(all_generated):
            if any(ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])):
                break
        upstream(self)

    generator.fit, trainer.__init__, trainer.broadcast_to_vllm = fit, init, broadcast_to_vllm


wrapt.register_post_import_hook(_record_actor, "openrlhf.trainer.ray.ppo_actor")
wrapt.register_post_import_hook(lambda m: _record(m.CriticPPOTrainer, "critic"), "openrlhf.trainer.ray.ppo_critic")
if "RECORDING_MIXED" in os.environ:
    wrapt.register_post_import_hook(_publish_amid_responses, "openrlhf.trainer.ppo_trainer_async")
