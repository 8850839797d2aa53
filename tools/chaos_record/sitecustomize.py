"""Loaded by every Python process of a run with this folder on PYTHONPATH: notes what the trainer trained on.

It hooks into OpenRLHF's own trainer. The file CHAOS_RECORD gets one JSON line a training step: its number, its fresh
prompts, what it logged, and the state before and after it, which a resumed run must take up where a step left it.
"""

import functools
import hashlib
import json
import os

import wrapt


def digest(pool) -> str:
    """Return a hash of everything in a replay pool."""
    found = hashlib.sha256()
    for key, group in pool._groups.items():
        found.update(f"{key} {group.num_reused}".encode())
        for sample in group.samples:
            for name in sorted(sample):
                found.update(name.encode() + sample[name].float().numpy().tobytes())
    return found.hexdigest()[:16]


def _state(trainer) -> dict:
    maker = trainer.experience_maker
    return {
        "version": maker.policy_version,
        "optimizer_steps": maker.num_optimizer_steps,
        "pool": digest(maker.pool),
    }


def _note_steps(ppo_trainer) -> None:
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
    upstream = trainer.train_step

    @functools.wraps(upstream)
    def train_step(self, rollout_samples, global_step: int):
        before = _state(self)
        prompts = [sample.prompts[0] for sample in rollout_samples]
        status, global_step = upstream(self, rollout_samples, global_step)
        record = {
            "step": global_step,
            "prompts": prompts[:: self.args.rollout.n_samples_per_prompt],
            "metrics": {name: value for name, value in status.items() if isinstance(value, float)},
            "before": before,
            "after": _state(self),
        }
        with open(os.environ["CHAOS_RECORD"], "a") as file:
            file.write(json.dumps(record) + "\n")
        return status, global_step

    trainer.train_step = train_step


wrapt.register_post_import_hook(_note_steps, "openrlhf.trainer.ppo_trainer")
