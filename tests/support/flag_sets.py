"""Random sets of OpenRLHF's flags, run through OpenRLHF's own command and ours, with weights to compare.

A set has two training steps of two prompts x four responses. All prompts are one and the same, and responses are
scripted, because OpenRLHF's prompt order and samples are not seeded. bf16 is OpenRLHF's.
"""

import argparse
import importlib
import json
import random
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pipeline
import torch
from safetensors.torch import load_file

NUM_SETS = 60
UPSTREAM = (str(pipeline.SUPPORT / "upstream_train.py"),)
AGENT = pipeline.SUPPORT / "scripted_agent_with_log_probs.py"

# Flags whose values are drawn from the choices of OpenRLHF's parser, and the flag that must be set for them.
CHOICES = {
    "algo.advantage.estimator": None,
    "actor.loss_agg_mode": None,
    "actor.optim": None,
    "critic.optim": "critic",
    "algo.kl.estimator": "algo.kl.init_coef",
    "algo.advantage.is_correction_level": None,
    "algo.advantage.is_correction_mode": "correction",
    "algo.advantage.is_correction_gating": "correction",
}
# Of these, the first choice is likelier: with the others, few sets of the other flags train in any command.
RARE = ("actor.optim", "critic.optim", "algo.advantage.is_correction_level")
# Switches, and how often they are drawn.
SWITCHES = {
    "train.enable_ema": 0.2,
    "train.async_enable": 0.2,
    "train.dynamic_batch_enable": 0.2,
    "train.colocate_actor_ref": 0.2,
    "train.colocate_all": 0.25,
    "ds.packing_samples": 0.25,
    "ds.adam_offload": 0.1,
    "ds.overlap_comm": 0.15,
    "ref.offload": 0.2,
    "algo.kl.use_loss": 0.5,
    "algo.kl.unbiased_gradient": 0.2,
    "algo.advantage.no_std_norm": 0.2,
    "algo.dynamic_filtering_enable": 0.15,
    "reward.normalize_enable": 0.1,
    "actor.gradient_checkpointing_enable": 0.25,
    "actor.gradient_checkpointing_reentrant": 0.1,
    "vllm.enable_prefix_caching": 0.2,
    "critic.save_value_network": 1.0,
}
# Other flags, and their values. None leaves the flag out; of equal values, some are likelier.
VALUES = {
    "ds.zero_stage": (0, 1, 2, 3),
    "ds.lora.rank": (None, None, None, 4),
    "ds.lora.dropout": (None, None, 0.1),
    "ds.grad_accum_dtype": (None, None, "fp32"),
    "ds.attn_implementation": ("sdpa", "eager"),
    "actor.num_gpus_per_node": (1, 2),
    "vllm.num_engines": (1, 2),
    "rollout.top_p": (*[None] * 4, 0.9),
    "rollout.temperature": (None, 0.7),
    "reward.overlong_buffer_len": (None, None, 4),
    "reward.overlong_penalty_factor": (None, 0.5),
    "reward.stop_properly_penalty_coef": (None, None, 0.5, -0.5),
    "reward.clip_range": (None, (-0.25, 0.5)),
    "data.prompt_probs": (None, None, "0.25,0.75"),
    "actor.dual_clip": (None, 3.0),
    "actor.entropy_coef": (None, 0, 0.01),
    "actor.eps_clip_low_high": (*[None] * 6, (0.1, 0.3)),
    "actor.max_norm": (None, 0, 0.1),
    "actor.adam.weight_decay": (None, 0.1),
    "actor.lr_scheduler": ("constant", "cosine_with_min_lr", "linear"),
    "algo.kl.init_coef": (0, 0.05),
    "algo.kl.target": (None, None, 0.1),
    "algo.advantage.gamma": (None, 0.9),
    "algo.advantage.lambd": (None, 0.9),
    "critic.freezing_steps": (None, None, 1),
    "train.max_epochs": (1, 2),
}
SIZES = {
    "data.max_samples": 4,
    "rollout.batch_size": 2,
    "rollout.n_samples_per_prompt": 4,
    "rollout.micro_batch_size": 4,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
    "train.max_tokens_per_gpu": 24,
    "ds.param_dtype": "bf16",
    "critic.adam.lr": 1e-3,
    "train.ema_beta": 0.5,  # with OpenRLHF's 0.992 bf16 rounds two steps' averages to the start
    "train.agent_func_path": AGENT,
    "reward.remote_url": None,
}


def parsers_choices() -> dict[str, list]:
    """Return the choices of each flag of OpenRLHF's parser that has some."""

    class Found(BaseException):
        pass

    def parse_args(parser):
        raise Found(parser)

    importlib.import_module("openrlhf_bapo.openrlhf")  # OpenRLHF on CPU
    upstream = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = parse_args
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    except Found as found:
        (parser,) = found.args
        return {action.dest: list(action.choices) for action in parser._actions if action.choices}
    finally:
        argparse.ArgumentParser.parse_args = upstream
    raise AssertionError("OpenRLHF's command no longer parses arguments")


def draw(seed: int, choices: dict[str, list]) -> dict:
    """Draw a set of flags. Some are left out because they have no effect beside the others, or because sizes forbid."""
    rng = random.Random(seed)
    drawn = {flag: rng.choice(choices[flag]) for flag in CHOICES}
    for flag in RARE:
        drawn[flag] = drawn[flag] if rng.random() < 0.4 else choices[flag][0]
    drawn |= {flag: rng.random() < often or None for flag, often in SWITCHES.items()}
    drawn |= {flag: rng.choice(values) for flag, values in VALUES.items()}
    is_set = {
        "critic": drawn["algo.advantage.estimator"] == "gae",
        "correction": drawn["algo.advantage.is_correction_level"] != "off",
        **{flag: bool(drawn[flag]) for flag in ("algo.kl.init_coef", "ds.lora.rank", "reward.overlong_buffer_len")},
    }
    needed = {flag: what for flag, what in CHOICES.items() if what}
    needed |= dict.fromkeys(("critic.save_value_network", "critic.freezing_steps", "algo.advantage.lambd"), "critic")
    needed |= dict.fromkeys(("algo.kl.use_loss", "algo.kl.unbiased_gradient", "algo.kl.target"), "algo.kl.init_coef")
    needed |= {"ds.lora.dropout": "ds.lora.rank", "ref.offload": "algo.kl.init_coef"}
    needed |= {"reward.overlong_penalty_factor": "reward.overlong_buffer_len"}
    drawn |= {flag: None for flag, what in needed.items() if not is_set[what]}
    num_ranks = drawn["actor.num_gpus_per_node"]
    drawn |= {f"{name}.num_gpus_per_node": num_ranks for name in ("ref", "critic")}
    if drawn["train.colocate_all"]:
        drawn["vllm.num_engines"] = num_ranks
    if drawn["train.async_enable"]:
        drawn["train.async_queue_size"] = rng.choice((1, 2))
        drawn["train.partial_rollout_enable"] = rng.choice((None, True))
    if drawn["algo.advantage.is_correction_gating"] not in (None, "ratio"):
        drawn["algo.advantage.is_correction_threshold"] = rng.choice((None, (0.3,), (0.3,)))
    return drawn


def arguments(directory: Path, drawn: dict, name: str) -> list[str]:
    """Return the flags of a run whose model goes to `directory`/NAME. All runs of a set start from the same files."""
    prompts = [directory / "train.jsonl"] * (2 if drawn["data.prompt_probs"] else 1)
    given = SIZES | drawn
    given |= {"data.prompt_dataset": ",".join(map(str, prompts)), "ckpt.output_dir": directory / name}
    given |= {"ckpt.path": directory / f"{name}-ckpt", "logger.tensorboard_dir": None}
    several = {flag: value for flag, value in given.items() if isinstance(value, tuple)}
    flags = pipeline.flags(directory, **{flag: None if flag in several else value for flag, value in given.items()})
    return [*flags, *(text for flag, values in several.items() for text in (f"--{flag}", *map(str, values)))]


def ours(drawn: dict, policy_loss: str) -> list[str]:
    """Return our own flags for a set: the loss, and OpenRLHF's ratio with ppo on stale data."""
    base = ["--offpolicy.ratio_base", "recomputed"] if drawn["train.async_enable"] and policy_loss == "ppo" else []
    return ["--policy_loss", policy_loss, *base]


def shown(drawn: dict) -> str:
    """Return the drawn flags as text."""
    words = (
        f"--{flag}" if value is True else f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for flag, value in drawn.items()
        if value is not None and not (flag.endswith("num_gpus_per_node") and flag[:5] != "actor")
    )
    return " ".join(words)


@dataclass(frozen=True)
class Run:
    """How a run ended, and the weights that it saved."""

    code: int
    log: str
    weights: dict[str, torch.Tensor]

    @property
    def refusal(self) -> str | None:
        """The one line with which our command refused the flags, or None."""
        lines = [line for line in self.log.splitlines() if line.startswith("openrlhf-bapo: --")]
        return lines[-1].removeprefix("openrlhf-bapo: ") if self.code == 2 and len(lines) == 1 else None

    @property
    def error(self) -> str:
        """The last line of the last traceback."""
        raised = re.findall(r"(?<!\w)(\w*(?:Error|Exception): .*)$", self.log, re.MULTILINE)
        return raised[-1][:160] if raised else self.log.strip().splitlines()[-1][:160]


def run(directory: Path, argv: list[str], name: str, command=pipeline.TRAIN, **environment: str) -> Run:
    """Run a training command to its end, whatever it is."""
    log = directory / f"{name}.log"
    with pipeline.running([pipeline.warm_python(), *command, *argv], log, **environment) as process:
        code = process.wait()
    weights = {}
    for file in sorted((directory / name).rglob("*.safetensors")) + sorted(
        (directory / name).rglob("adapter_model.bin")
    ):
        loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        weights |= {f"{file.parent.relative_to(directory)}/{key}": value for key, value in loaded.items()}
    text = "\n".join(line for line in log.read_text().splitlines() if "warning: " not in line)
    return Run(code, text, {key.removeprefix(name): value for key, value in weights.items()})


def differs_on_purpose(drawn: dict) -> str | None:
    """Return why the weights of a set may differ from OpenRLHF's, or None: the rows of docs/openrlhf.md."""
    if drawn["train.dynamic_batch_enable"] and drawn["ds.zero_stage"] in (1, 2):
        return "all micro-batches of a dynamic batch count"
    return None


@dataclass(frozen=True)
class Outcome:
    """A row of the table: what `ppo` and `bapo` did with a set of flags."""

    seed: int
    flags: str
    ppo: str
    bapo: str
    is_fine: bool


def compare(directory: Path, seed: int, drawn: dict) -> Outcome:
    """Run a set through OpenRLHF's command and through ours with `ppo` and `bapo`; `directory` is empty."""
    pipeline.make_model(directory)
    row = json.dumps({"input": "1+2=", "label": "", "datasource": "sums"}) + "\n"
    (directory / "train.jsonl").write_text(row * 8)
    # With LoRA, OpenRLHF ends at its first broadcast. Scripted responses do not need it.
    environment = {"UPSTREAM_BROADCASTS": "" if drawn["ds.lora.rank"] else "1"}
    upstream = run(directory, arguments(directory, drawn, "upstream"), "upstream", UPSTREAM, **environment)
    ppo, bapo = (
        run(directory, [*arguments(directory, drawn, name), *ours(drawn, name)], name) for name in ("ppo", "bapo")
    )
    start = load_file(directory / "model/model.safetensors")
    of_ppo, is_fine = _compare_with_upstream(ppo, upstream, differs_on_purpose(drawn), start)
    of_bapo = "trains" if bapo.code == 0 else f"refused: {bapo.refusal}" if bapo.refusal else f"fails: {bapo.error}"
    return Outcome(seed, shown(drawn), of_ppo, of_bapo, is_fine and not of_bapo.startswith("fails"))


def _compare_with_upstream(ppo: Run, upstream: Run, reason: str | None, start: dict) -> tuple[str, bool]:
    if ppo.refusal:
        # A refusal is right where OpenRLHF fails too, or where it says why it would be wrong.
        ends = "OpenRLHF trains" if upstream.code == 0 else f"OpenRLHF fails: {upstream.error}"
        return f"refused: {ppo.refusal} ({ends})", True
    if ppo.code:
        return f"fails: {ppo.error}" + ("" if upstream.code == 0 else f" (OpenRLHF: {upstream.error})"), False
    if upstream.code:
        return f"trains (OpenRLHF fails: {upstream.error})", True
    if ppo.weights.keys() != upstream.weights.keys() or not ppo.weights:
        return "other names of weights", False
    largest = max(_gap(weight, upstream.weights[name]) for name, weight in ppo.weights.items())
    if largest == 0:
        trained = [float(weight.abs().max()) for name, weight in ppo.weights.items() if "lora_B" in name]
        trained += [_gap(weight, ppo.weights[f"/{name}"]) for name, weight in start.items() if not trained]
        return "equal to the bit" + ("" if max(trained) else "; the saved weights did not move"), True
    return f"differs by up to {largest:.1g}" + (f": {reason}" if reason else ""), reason is not None


def _gap(weight: torch.Tensor, other: torch.Tensor) -> float:
    return float((weight.float() - other.float()).abs().max())
