"""A user's mistake ends in one line with the flag and its value, and exit code 2, before Ray starts.

Each row of the table changes one command that passes, so that it can only fail because of this change.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pipeline
import pyarrow
import pyarrow.parquet
import pytest
import torch

from openrlhf_bapo.cli import evaluate
from openrlhf_bapo.flags import arguments, checks, input_files
from openrlhf_bapo.offpolicy.replay_pool import Group, ReplayConfig, ReplayPool
from openrlhf_bapo.openrlhf.replay_checkpoint import _replay_fingerprint

HAS_GPU = torch.cuda.is_available()


def reward_model(directory: Path) -> dict:
    """Rewards from a model, not from a function."""
    return dict(reward__remote_url=None, reward__model_name_or_path=directory / "model")


# --flag value, and a part of the message.
VALUES = [
    *(
        (flag, 0, "allowed: 1 or more")
        for flag in (
            "actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size ds.ring_attn_size "
            "ds.tensor_parallel_size ds.zpg data.max_samples rollout.max_new_tokens rollout.batch_size "
            "rollout.n_samples_per_prompt rollout.micro_batch_size rollout.max_tokens_per_gpu train.batch_size "
            "train.micro_batch_size train.max_tokens_per_gpu train.max_epochs train.num_episodes "
            "train.async_queue_size eval.n_samples_per_prompt logger.logging_steps ckpt.max_num"
        ).split()
    ),
    ("rollout.batch_size", -16, "allowed: 1 or more"),
    ("rollout.vllm_generate_batch_size", -1, "allowed: 1 or more"),
    ("train.micro_batch_size", -8, "allowed: 1 or more"),
    ("data.max_len", -5, "allowed: 2 or more"),
    ("data.max_len", 0, "allowed: 2 or more"),
    ("data.dataloader_num_workers", -1, "allowed: 0 or more"),
    ("data.max_images_per_prompt", -1, "allowed: 0 or more"),
    ("ds.lora.rank", -8, "allowed: 0 or more"),
    ("ckpt.save_steps", 0, "allowed: -1 (never), or 1 or more"),
    ("ckpt.save_steps", -2, "allowed: -1 (never), or 1 or more"),
    ("eval.steps", 0, "allowed: -1 (never), or 1 or more"),
    ("critic.freezing_steps", -2, "allowed: -1 (none), or more"),
    ("train.seed", -1, "allowed: from 0 to 2**32 - 1"),
    ("actor.adam.lr", -1.0, "allowed: 0 or more, and finite"),
    ("actor.adam.lr", "nan", "allowed: 0 or more, and finite"),
    ("actor.adam.lr", "inf", "allowed: 0 or more, and finite"),
    ("critic.adam.lr", -1.0, "allowed: 0 or more, and finite"),
    ("actor.adam.weight_decay", -0.1, "allowed: 0 or more, and finite"),
    ("actor.adam.eps", 0.0, "allowed: above 0, and finite"),
    ("actor.max_norm", -1.0, "allowed: 0 or more, and finite"),
    ("actor.eps_clip", -0.2, "allowed: 0 or more, and finite"),
    ("actor.dual_clip", 0.5, "allowed: above 1"),
    ("actor.entropy_coef", "nan", "allowed: a finite number"),
    ("actor.lr_warmup_ratio", 3.0, "allowed: from 0 to 1"),
    ("actor.min_lr_ratio", -0.1, "allowed: from 0 to 1"),
    ("algo.kl.init_coef", -0.01, "allowed: 0 or more, and finite"),
    ("algo.advantage.gamma", 1.5, "allowed: from 0 to 1"),
    ("algo.advantage.lambd", -1.0, "allowed: from 0 to 1"),
    ("critic.value_clip", 0.0, "allowed: above 0, and finite"),
    ("rollout.temperature", 0.0, "allowed: above 0, and finite"),
    ("rollout.temperature", -1.0, "allowed: above 0, and finite"),
    ("rollout.temperature", "nan", "allowed: above 0, and finite"),
    ("eval.temperature", -0.5, "allowed: 0 or more, and finite"),
    ("rollout.top_p", 2.0, "allowed: above 0, up to 1"),
    ("rollout.top_p", 0.0, "allowed: above 0, up to 1"),
    ("vllm.gpu_memory_utilization", 1.5, "allowed: above 0, up to 1"),
    ("ckpt.max_mem", 0.0, "allowed: above 0"),
    ("reward.stop_properly_penalty_coef", 2.0, "allowed: up to 1"),
    ("ds.zero_stage", 7, "allowed: 0, 1, 2, 3"),
    ("actor.lr_scheduler", "cosin", "allowed: linear, cosine, "),
    (
        "actor.lr_scheduler",
        "warmup_stable_decay",
        "allowed: linear, cosine, ",
    ),  # needs more arguments
    ("vllm.sync_backend", "ncll", "allowed: nccl, gloo"),
    ("ds.grad_accum_dtype", "fp8", "allowed: bf16, fp16, fp32"),
    ("ds.attn_implementation", "flash", "allowed: eager, sdpa, "),
    ("ckpt.best_metric_key", "reward", "allowed: none, or a metric of the evaluation"),
    ("data.input_template", "Question:", "allowed: a text with {} for the input"),
    ("data.input_template", "{} and {name}", "allowed: a text with {} for the input, other braces doubled"),
    ("data.input_template", "{} and {}", "allowed: a text with {} for the input"),
    ("data.input_template", "\\boxed{{}}", "allowed: a text with {} for the input"),
    ("data.prompt_probs", "0.5,0.5", "allowed: 1 numbers, one for each data set, that add up to 1"),
    ("data.prompt_probs", "half", "allowed: 1 numbers, one for each data set, that add up to 1"),
    # In the words of OpenRLHF's parser.
    ("train.batch_size", "many", "invalid int value"),
    ("actor.adam.lr", "fast", "invalid float value"),
    ("algo.advantage.estimator", "ppo", "invalid choice"),
    ("ds.param_dtype", "fp64", "invalid choice"),
    # Ours.
    ("policy_loss", "dapo", "invalid choice"),
    ("replay.ratio", -1.0, "must be at least 0"),
    ("partial.oversample", 0.5, "must be at least 1"),
    ("replay.capacity", 7, "does nothing without --replay.ratio"),
    ("replay.max_staleness", 2, "does nothing without --replay.ratio"),
    ("replay.strategy", "newest", "does nothing without --replay.ratio"),
    ("partial.max_segments", 2, "does nothing without --partial.token_budget"),
    ("partial.on_stale", "finish", "does nothing without --partial.token_budget"),
    # Together with other flags. The baseline is a rollout of 16 prompts x 4 samples on one rank.
    ("train.batch_size", 20, "must be a multiple of 8, --train.micro_batch_size 8 on each of the 1 data-"),
    ("train.batch_size", 128, "a rollout has only 64 samples"),
    ("train.micro_batch_size", 48, "--train.batch_size 32: must be a multiple of 48"),
    ("rollout.micro_batch_size", 65, "leaves fewer than 1 micro-batches"),
    ("rollout.n_samples_per_prompt", 1, "--algo.advantage.estimator group_norm compares the responses"),
    ("rollout.max_new_tokens", 24, "must be below --data.max_len 24"),
    ("data.max_len", 4096, "the model has 128 positions"),
    ("reward.overlong_buffer_len", 9.0, "must be below the 8 tokens of a response"),
    ("rollout.vllm_generate_batch_size", 32, "allowed only with --train.async_enable"),
    ("actor.num_gpus_per_node", 3, "must be a multiple of 24"),
    # Files and folders.
    ("actor.model_name_or_path", "/nowhere/model", "no such folder"),
    ("actor.model_name_or_path", "runs/nowhere/model", "no such folder"),
    ("data.prompt_dataset", "nowhere.jsonl", "no such file"),
    ("data.prompt_dataset", "/nowhere/prompts", "no such file"),
    ("eval.dataset", "nowhere.jsonl", "no such file"),
    ("data.input_key", "question", "has no key 'question'; allowed for --data.input_key: one of input, label"),
    ("data.label_key", "answer", "has no key 'answer'; allowed for --data.label_key: one of input, label"),
    ("reward.remote_url", "nowhere.py", "no such file"),
    ("reward.remote_url", "reward.txt", "allowed: a reward-function file (.py), or HTTP URLs"),
    ("reward.remote_url", "localhost:5000/get_reward", "allowed: a reward-function file (.py), or HTTP URLs"),
    ("reward.remote_url", "http://a/get_reward,nowhere.py", "allowed: a reward-function file (.py), or HTTP URLs"),
    ("reward.remote_url", "http://a:port/get_reward", "allowed: a reward-function file (.py), or HTTP URLs"),
    ("train.agent_func_path", "nowhere.py", "no such file"),
    ("ckpt.path", "/proc/nowhere", "cannot be written (/proc: "),
    ("ckpt.output_dir", "/proc/nowhere/model", "cannot be written (/proc: "),
    ("logger.tensorboard_dir", "/dev/null/tensorboard", "cannot be written (/dev/null: "),
]

# Changes to the command, and parts of the message.
COMMANDS = {
    "no model": (dict(actor__model_name_or_path=None), ["--actor.model_name_or_path: is missing"]),
    "no prompts": (dict(data__prompt_dataset=None), ["--data.prompt_dataset: is missing"]),
    "no prompts for a rule of ours": (
        dict(policy_loss="bapo", data__prompt_dataset=None),
        ["--data.prompt_dataset: is missing"],
    ),
    "no reward": (dict(reward__remote_url=None), ["--reward.remote_url: is missing"]),
    "no engines": (dict(vllm__num_engines=None), ["--vllm.num_engines: is missing", "1 or more"]),
    "images that would wait": (
        dict(rollout__vllm_generate_batch_size=32, train__async_enable=True, data__max_images_per_prompt=1),
        ["--rollout.vllm_generate_batch_size 32", "allowed only without --data.max_images_per_prompt"],
    ),
    "an unknown flag": (dict(train__batch_sise=64), ["unrecognized arguments: --train.batch_sise 64"]),
    "betas": ({"actor.adam.betas": "0.9 1.5"}, ["--actor.adam.betas 0.9 1.5", "from 0, below 1"]),
    "clip range": ({"reward.clip_range": "10 -10"}, ["--reward.clip_range 10.0 -10.0", "LOW below HIGH"]),
    "filtering": (
        {"algo.dynamic_filtering_range": "1 0", "algo.dynamic_filtering_enable": True},
        ["--algo.dynamic_filtering_range 1.0 0.0", "LOW below HIGH"],
    ),
    "never replays": (
        dict(replay__ratio=1, replay__max_staleness=0),
        ["--replay.max_staleness 0", "never replays", "1 or more"],
    ),
    "a pool too small": (
        dict(replay__ratio=1, replay__capacity=15),
        ["--replay.capacity 15", "16 groups", "allowed: 16 or more"],
    ),
    "a batch of nothing with replay": (
        dict(replay__ratio=1, train__batch_size=0),
        ["--train.batch_size 0: allowed: 1 or more"],
    ),
    "replay that draws nothing": (dict(replay__ratio=0.01), ["--replay.ratio 0.01: draws 0 groups"]),
    "a time limit of a reward model": (
        lambda d, _: dict(reward_fault__timeout=9, reward__remote_url=None, reward__model_name_or_path=d / "model"),
        ["--reward_fault.timeout 9: does nothing without --reward.remote_url"],
    ),
    "a limit on dropped groups of a reward model": (
        lambda d, _: dict(
            reward_fault__max_drop_rate=0.5, reward__remote_url=None, reward__model_name_or_path=d / "model"
        ),
        ["--reward_fault.max_drop_rate 0.5: does nothing without --reward.remote_url or --train.agent_func_path"],
    ),
    "evaluation of nothing": (dict(eval__at_start=True), ["--eval.at_start: does nothing without --eval.dataset"]),
    "evaluation with a reward model": (
        lambda d, _: dict(
            eval__dataset=d / "train.jsonl", reward__remote_url=None, reward__model_name_or_path=d / "model"
        ),
        ["--eval.dataset", "not with a reward model"],
    ),
    "bapo's flag without bapo": (dict(bapo__preset="paper"), ["--bapo.preset paper", "--policy_loss bapo"]),
    "bapo and a fixed clip": (dict(policy_loss="bapo", actor__eps_clip=0.3), ["--actor.eps_clip"]),
    "engines beside colocated actors": (
        dict(train__colocate_all=True, vllm__num_engines=2),
        ["--vllm.num_engines 2", "the actor's 1 GPUs"],
    ),
    "a rollout that leaves samples over": (
        dict(policy_loss="bapo", train__batch_size=24),
        ["--train.batch_size 24: with --policy_loss bapo it must divide --rollout.batch_size x ", "which is 64"],
    ),
    "data that fill no optimizer step": (
        dict(policy_loss="bapo", data__max_samples=7),
        ["--data.prompt_dataset ", "7 prompts x --rollout.n_samples_per_prompt 4 fill no optimizer step", " 32"],
    ),
    "a critic on more GPUs than replay allows": (
        dict(replay__ratio=1, algo__advantage__estimator="gae", critic__num_gpus_per_node=2),
        ["--critic.num_gpus_per_node 2: with --replay.ratio", "as the actor, 1"],
    ),
    "overlapping communication that needs DeepSpeed's counting": (
        dict(train__dynamic_batch_enable=True, ds__zero_stage=1, ds__overlap_comm=True),
        ["--ds.overlap_comm: with --train.dynamic_batch_enable"],
    ),
    "a compiler that needs DeepSpeed's counting": (
        dict(train__dynamic_batch_enable=True, ds__zero_stage=2, ds__deepcompile=True),
        ["--ds.deepcompile: with --train.dynamic_batch_enable"],
    ),
    "a reference that shares other GPUs": (
        dict(train__colocate_actor_ref=True, algo__kl__init_coef=0.1, ref__num_gpus_per_node=2),
        ["--ref.num_gpus_per_node 2", "the actor's 1 x 1"],
    ),
    "a critic whose ranks do not divide the batch": (
        dict(algo__advantage__estimator="gae", critic__num_gpus_per_node=3),
        ["--train.batch_size 32: must be a multiple of 24", "the 3 data-parallel ranks of --critic.num_gpus"],
    ),
    "a critic on more GPUs than all models share": (
        dict(train__colocate_all=True, algo__advantage__estimator="gae", critic__num_gpus_per_node=8),
        ["--critic.num_gpus_per_node 8: allowed with --train.colocate_all: up to the actor's 1 GPUs"],
    ),
    "a reward model on more GPUs than all models share": (
        lambda d, _: reward_model(d) | dict(train__colocate_all=True, reward__num_nodes=2),
        ["--reward.num_nodes 2 x --reward.num_gpus_per_node 1: allowed with --train.colocate_all: up to"],
    ),
    "a critic and a reward model that share GPUs and differ in number": (
        lambda d, _: (
            reward_model(d)
            | dict(train__colocate_critic_reward=True, algo__advantage__estimator="gae", critic__num_gpus_per_node=2)
        ),
        ["--reward.num_gpus_per_node 1: must equal --critic.num_nodes 1 x --critic.num_gpus_per_node 2"],
    ),
    **{
        f"a ring that does not fit {name}": (
            lambda d, _, name=name: (
                reward_model(d)
                | dict(algo__kl__init_coef=0.1, algo__advantage__estimator="gae", ds__ring_attn_size=2)
                | {f"{other}.num_gpus_per_node": 2 for other in ("actor", "ref", "critic", "reward")}
                | {f"{name}.num_gpus_per_node": 3}
            ),
            [f"--{name}.num_gpus_per_node 3: must be a multiple of --ds.ring_attn_size 2"],
        )
        for name in ("ref", "critic", "reward")
    },
    "a discarded pool of no resume": (
        dict(replay__ratio=1, replay__discard_saved=True),
        ["--replay.discard_saved: does nothing without --ckpt.load_enable"],
    ),
    "discarded samples of no resume": (
        dict(partial__token_budget=4, partial__discard_saved=True),
        ["--partial.discard_saved: does nothing without --ckpt.load_enable"],
    ),
    "discarded averages of no resume": (
        dict(policy_loss="bapo", bapo__smoothing=20, bapo__discard_saved=True),
        ["--bapo.discard_saved: does nothing without --ckpt.load_enable"],
    ),
    "no GPU for a reward model": (
        lambda d, _: reward_model(d) | dict(reward__num_nodes=0),
        ["--reward.num_nodes 0 x --reward.num_gpus_per_node 1: allowed: 1 or more"],
    ),
    "a ring that does not fit": (
        dict(ds__ring_attn_size=2, actor__num_gpus_per_node=3),
        ["--ds.ring_attn_size 2", "the actor's 3 GPUs"],
    ),
    "OpenRLHF: partial without async": (dict(train__partial_rollout_enable=True), ["--train.partial_rollout_enable"]),
    "OpenRLHF: filtering one sample": (
        dict(
            algo__dynamic_filtering_enable=True,
            rollout__n_samples_per_prompt=1,
            rollout__batch_size=64,
            algo__advantage__estimator="gae",
        ),
        ["n_samples_per_prompt must be greater than 1"],
    ),
    "OpenRLHF: images and a critic": (
        dict(data__max_images_per_prompt=1, algo__advantage__estimator="gae"),
        ["does not support critic"],
    ),
    "gradients that DeepSpeed would not add up": (
        dict(ds__zero_stage=0, ds__grad_accum_dtype="float32", ds__param_dtype="bf16"),
        ["--ds.grad_accum_dtype float32: with --ds.zero_stage 0 it must be --ds.param_dtype bf16"],
    ),
    "a template beside a chat template": (
        dict(data__input_template="Q: {}", data__apply_chat_template=True),
        ["--data.input_template Q: {}: allowed only without --data.apply_chat_template"],
    ),
    "no chat template": (dict(data__apply_chat_template=True), ["--data.apply_chat_template", "has no chat template"]),
    "a package that is not installed": (
        dict(use_ms=True),
        ["--use_ms: needs the package modelscope, which is not installed"],
    ),
    "a correction that clips sequences": (
        {f"algo.advantage.is_correction_{name}": value for name, value in (("level", "seq"), ("mode", "clip"))},
        ["--algo.advantage.is_correction_mode clip: allowed with ", "level token and ", "not with seq and ratio"],
    ),
    "a correction by a divergence with the bounds of a ratio": (
        {f"algo.advantage.is_correction_{name}": value for name, value in (("level", "token"), ("gating", "tv"))},
        ["--algo.advantage.is_correction_threshold 0.5 5.0: allowed with ", "gating tv: one number"],
    ),
    "an average that keeps the initial weights": (
        dict(train__enable_ema=True, ds__zero_stage=3),
        [
            "--train.enable_ema: with --ds.zero_stage 3",
            "the initial weights",
            "allowed with --ds.zero_stage 0, 1 and 2",
        ],
    ),
    "muon on parts of weights": (
        dict(actor__optim="muon", ds__zero_stage=3),
        ["--actor.optim muon: DeepSpeed does not have it with --ds.zero_stage 3"],
    ),
    "muon on parts of offloaded weights": (
        dict(algo__advantage__estimator="gae", critic__optim="muon", ds__adam_offload=True),
        ["--critic.optim muon: DeepSpeed does not have it with --ds.adam_offload"],
    ),
    "muon on gradients of two types": (
        dict(actor__optim="muon", ds__grad_accum_dtype="fp32", ds__param_dtype="bf16"),
        ["--actor.optim muon: DeepSpeed does not have it with --ds.grad_accum_dtype fp32"],
    ),
    "weights that engines cannot load": (dict(ds__load_in_4bit=True), ["--ds.load_in_4bit: ", "weights of 4 bits"]),
    "an adapter and an average of all weights": (
        dict(ds__lora__rank=8, train__enable_ema=True),
        ["--ds.lora.rank 8: allowed only without --train.enable_ema"],
    ),
    "an adapter of split weights": (
        dict(ds__lora__rank=8, ds__tensor_parallel_size=2, actor__num_gpus_per_node=2),
        ["--ds.lora.rank 8: allowed only with --ds.tensor_parallel_size 1, not 2"],
    ),
    "an adapter of nothing": (
        {"ds.lora.rank": 8, "ds.lora.target_modules": ""},
        ["--ds.lora.target_modules: is empty; allowed: all-linear, or names of modules"],
    ),
    "an adapter of a module that the model lacks, beside one that it has": (
        {"ds.lora.rank": 8, "ds.lora.target_modules": "q_proj query"},
        ["--ds.lora.target_modules query: the model has no such module; allowed: all-linear, ", " q_proj, "],
    ),
    "an adapter of one of two uses of a weight": (
        lambda d, m: (
            model(edit("config.json", tie_word_embeddings=True))(d, m)
            | {"ds.lora.rank": 8, "ds.lora.target_modules": "q_proj lm_head"}
        ),
        ["--ds.lora.target_modules lm_head: the model has one weight for input and output"],
    ),
    "heads": (dict(vllm__tensor_parallel_size=4), ["--vllm.tensor_parallel_size 4", "2 attention heads"]),
}


def on_the_cpu(flag: str):
    return dict([(flag, 2), ("actor.num_gpus_per_node", 2)]), [f"--{flag} 2: needs GPUs; allowed on the CPU: 1"]


if not HAS_GPU:
    COMMANDS |= {
        f"{flag} on the CPU": on_the_cpu(flag)
        for flag in ("vllm.tensor_parallel_size", "ds.tensor_parallel_size", "ds.ring_attn_size")
    }


def file(flag: str, name: str, content: str | bytes, **more):
    """A fault: `flag` names a file with this content."""

    def fault(directory: Path, _) -> dict:
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return {flag: directory / name} | more

    return fault


def prompts(content: str | bytes, name: str = "prompts.jsonl"):
    return file("data.prompt_dataset", name, content)


MESSAGES = [{"role": "user", "content": "1+2="}]


def make_table(file: Path, table: pyarrow.Table) -> None:
    """Write a table in the format of the name: Parquet, a file or a stream of Arrow, or a folder."""
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    elif file.suffix == ".arrow":
        new = pyarrow.ipc.new_stream if "stream" in file.name else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(file), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    elif file.suffix == ".saved":
        datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(file)
    else:
        file.mkdir()
        pyarrow.parquet.write_table(table, file / "train-00000-of-00001.parquet")


def table(name: str, *columns: tuple[str, list], **more):
    """A fault: prompts in a table of this format, with these columns."""

    def fault(directory: Path, _) -> dict:
        names, values = zip(*columns, strict=True)
        make_table(directory / name, pyarrow.Table.from_arrays([pyarrow.array(x) for x in values], list(names)))
        return {"data.prompt_dataset": directory / name} | more

    return fault


def reward(content: str):
    return file("reward.remote_url", "wrong.py", content)


def never_loaded(directory: Path, monkeypatch) -> dict:
    monkeypatch.setattr(input_files, "LOAD_LIMIT", 3)
    return reward("while True: pass\n")(directory, monkeypatch)


def agent(content: str):
    return file("train.agent_func_path", "agent.py", content, reward__remote_url=None)


def model(change):
    """A fault: `change(folder)` of the model's folder."""

    def fault(directory: Path, _) -> dict:
        change(directory / "model")
        return {}

    return fault


def edit(name: str, **values):
    def change(folder: Path) -> None:
        known = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({k: v for k, v in known.items() if v is not None}))

    return change


def tokens_of_a_llama(**values):
    def change(folder: Path) -> None:
        edit("config.json", model_type="llama")(folder)
        edit("tokenizer_config.json", **values)(folder)

    return change


def without(name: str):
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def text(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def index_without_its_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def checkpoint(latest: str | None, prefix: str = "", **more):
    """A fault: a resume from a folder with this in its file `latest`, and optimizer files with this prefix."""

    def fault(directory: Path, _) -> dict:
        pipeline.make_checkpoint(directory / "ckpt/_actor/global_step2", zero_stage=2, prefix=prefix)
        if latest is not None:
            (directory / "ckpt/_actor/latest").write_text(latest)
        return dict(ckpt__load_enable=True) | more

    return fault


def cut_off(folder: Path) -> dict:
    os.truncate(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", 100)
    return {}


def on_two_gpus(**changes):
    """A fault on a machine where torch finds two GPUs, without flash-attn."""

    def fault(_, monkeypatch) -> dict:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        return changes

    return fault


def saved_pool(**change):
    """A fault: a resume with other settings than those that the pool was saved with."""

    def fault(directory: Path, monkeypatch) -> dict:
        resume = checkpoint("global_step2", replay__ratio=1)(directory, monkeypatch)
        sample = {"tokens": torch.arange(4), **{name: torch.ones(3) for name in ("action_mask", "advantages")}}
        sample |= {"behavior_log_probs": torch.zeros(3), "versions": torch.zeros(3)}
        pool = ReplayPool(ReplayConfig(ratio=1.0))
        pool.add([Group([dict(sample) for _ in range(4)], torch.arange(4.0))])
        before = pipeline.parse(pipeline.flags(directory, replay__ratio=1))
        state = {"policy_version": 2, "steps_by_version": [0, 1, 2]}
        pool.save(directory / "ckpt/_replay/global_step2", state, _replay_fingerprint(before))
        return resume | change

    return fault


def damaged_pool(directory: Path, monkeypatch) -> dict:
    resume = saved_pool()(directory, monkeypatch)
    os.truncate(directory / "ckpt/_replay/global_step2/groups.safetensors", 100)
    return resume


def ray_address(value: str):
    def fault(directory: Path, monkeypatch) -> dict:
        monkeypatch.setenv("RAY_TMPDIR", str(directory))
        monkeypatch.setenv("RAY_ADDRESS", value.format(pipeline.free_port()))
        return {}

    return fault


ROW = '{"input": "1+2=", "label": "3"}\n'
LARGE = ROW * (9 << 20 >> 5)  # more than is read whole

# Changes to a copy of the baseline's files, and parts of the message.
FILES = {
    "an adapter as a model": (
        model(lambda folder: (folder / "model.safetensors").rename(folder / "adapter_config.json")),
        ["--actor.model_name_or_path ", "is a LoRA adapter; allowed: a whole model, which python -m openrlhf.cli.lora"],
    ),
    "an empty prompt file": (prompts(""), ["--data.prompt_dataset", "prompts.jsonl: has no rows"]),
    "a blank prompt file": (prompts("\n\n"), ["prompts.jsonl: has no rows"]),
    "prompts that are no JSON": (prompts(ROW + "1+2=\n"), ["prompts.jsonl: line 2 is not JSON"]),
    "prompts that are cut off": (prompts(ROW * 3 + ROW[:20]), ["prompts.jsonl: line 4 is not JSON"]),
    "prompts that are no text": (prompts(b"\xff\xfe\x00"), ["prompts.jsonl: cannot be read"]),
    "prompts that are no objects": (prompts('"1+2="\n'), ["prompts.jsonl: line 1 is not a JSON object"]),
    "a null prompt": (
        prompts(ROW + '{"input": null, "label": "3"}\n' + ROW),
        ["prompts.jsonl: line 2 has 'input' null", "--data.input_key"],
    ),
    "an empty prompt": (prompts('{"input": "", "label": "3"}\n'), ["prompts.jsonl: line 1 has 'input' \"\""]),
    "a number as prompt": (prompts('{"input": 3, "label": "3"}\n'), ["prompts.jsonl: line 1 has 'input' 3"]),
    "messages without chat template": (
        prompts('{"input": [{"role": "user", "content": "1+2="}], "label": "3"}\n'),
        ["line 1 has 'input' [{", "allowed for --data.input_key: a text"],
    ),
    "a row without its label": (
        prompts(ROW + '{"input": "1+2="}\n'),
        ["line 2 has no key 'label'; allowed for --data.label_key: one of input"],
    ),
    "an array whose rows lack the key": (
        prompts('[{"input": "1+2=",\n "label": "3"}, {"prompt": "1+2="}]', "prompts.json"),
        ["prompts.json: row 2 has no key 'input'"],
    ),
    "a large file that is cut off": (prompts(LARGE + ROW[:20]), ["prompts.jsonl: a row at its end is not JSON"]),
    "a large file whose first row is wrong": (prompts("oops\n" + LARGE), ["prompts.jsonl: line 1 is not JSON"]),
    "a table without the key": (
        prompts("question,label\n1+2=,3\n", "prompts.csv"),
        ["prompts.csv: its table has no key 'input'"],
    ),
    "a CSV file of a header": (prompts("input,label\n\n", "prompts.csv"), ["prompts.csv: has no rows"]),
    "a Parquet file without rows": (
        table("prompts.parquet", ("input", []), ("label", [])),
        ["prompts.parquet: has no rows; allowed: a file with at"],
    ),
    **{
        f"{what} in {name}": (
            table(name, ("input", values), ("label", ["3"] * len(values))),
            [f"{name}: ", f"row {len(values)} has 'input' {shown}", "allowed for --data.input_key: a text, not empty"],
        )
        for name in ("prompts.parquet", "prompts.arrow", "stream.arrow", "prompts.saved", "folder")
        for what, values, shown in (
            ("messages without chat template", [MESSAGES], '[{"role'),
            ("a null prompt", ["1+2=", None], "null"),
            ("an empty prompt", ["1+2=", "1+3=", ""], '""'),
            ("a number as prompt", [3], "3"),
        )
    },
    "a number as prompt in CSV": (prompts("input,label\n12,3\n", "prompts.csv"), ["row 1 has 'input' 12"]),
    "a null prompt in CSV": (prompts("input,label\n1+2=,3\n,4\n", "prompts.csv"), ["row 2 has 'input' null"]),
    "a column twice in CSV": (
        prompts("input,input,label\n1+2=,1+3=,3\n", "prompts.csv"),
        ["prompts.csv: its table has the column 'input' twice"],
    ),
    "a column twice in Parquet": (
        table("prompts.parquet", ("input", ["1+2="]), ("x", [1]), ("x", [2]), ("label", ["3"])),
        ["prompts.parquet: its table has the column 'x' twice"],
    ),
    **{
        f"{what} in {name}": (
            prompts(f"[{ROW.strip()},\n{row}]" if name == "prompts.json" else ROW + row, name),
            [f"{name}: {'row' if name == 'prompts.json' else 'line'} 2 {said}"],
        )
        for name in ("prompts.jsonl", "prompts.json")
        for what, row, said in (
            ("half of a character", '{"input": "1+\\ud835=", "label": "3"}', r"has \ud835, half of a character"),
            ("half of one deep in a row", '{"input": "1", "label": "3", "x": {"y": ["\\udc00"]}}', r"has \udc00, half"),
            ("half of one in a key", '{"input": "1+2=", "label": "3", "\\ud800": 1}', r"has \ud800, half"),
            ("a key twice", '{"input": "1+2=", "input": "1+3=", "label": "3"}', "has the key 'input' twice; allowed"),
            ("a key twice deep in a row", '{"input": "1", "label": "3", "x": [{"y": 1, "y": 2}]}', "has the key 'y'"),
        )
    },
    "a large file with half of a character at its end": (
        prompts(LARGE + '{"input": "\\ud835", "label": "3"}\n'),
        [r"prompts.jsonl: a row at its end has \ud835, half of a character"],
    ),
    "a byte order mark in the middle": (prompts(ROW + "\ufeff" + ROW), ["prompts.jsonl: line 2 is not JSON"]),
    "a Parquet file that is none": (prompts(ROW, "prompts.parquet"), ["prompts.parquet: cannot be read"]),
    "an evaluation file without label": (
        file("eval.dataset", "heldout.jsonl", '{"input": "1+2="}\n'),
        ["--eval.dataset", "heldout.jsonl: line 1 has no key 'label'"],
    ),
    "no config": (model(without("config.json")), ["--actor.model_name_or_path", "model: has no config.json"]),
    "a config that is cut off": (model(cut("config.json", 100)), ["model: its config.json cannot be loaded"]),
    "an unknown architecture": (
        model(edit("config.json", model_type="qwen9")),
        ["model: its config.json cannot", "qwen9"],
    ),
    "no language model": (
        model(text("config.json", '{"model_type": "vit"}')),
        ["model_type 'vit' is not a language"],
    ),
    "no tokenizer": (model(without("tokenizer.json")), ["model: has no tokenizer"]),
    "a tokenizer that is cut off": (model(cut("tokenizer.json", 100)), ["model: its tokenizer cannot be loaded"]),
    "neither EOS nor pad": (
        model(tokens_of_a_llama(eos_token=None, pad_token=None)),
        ["model: its tokenizer has neither an EOS nor a padding token"],
    ),
    "an EOS token that the model does not have": (
        # transformers gives a Qwen2 without one its own.
        model(edit("tokenizer_config.json", eos_token=None)),
        ["model: its EOS token '<|endoftext|>' is number 17; allowed: below the model's 17"],
    ),
    "no weights": (model(without("model.safetensors")), ["model: has no weights"]),
    "weights that are cut off": (
        model(cut("model.safetensors", 100_000)),
        ["model: model.safetensors is not a whole safetensors file (", "not fully covered); copy it again"],
    ),
    "weights whose header is cut off": (
        model(cut("model.safetensors", 100)),
        ["model.safetensors is not a whole safetensors file (", "invalid header length); copy it again"],
    ),
    "empty weights": (model(cut("model.safetensors", 0)), ["model.safetensors is not a whole safetensors file"]),
    "a pointer instead of weights": (
        model(text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 147744\n")),
        ["model.safetensors is not a whole safetensors file"],
    ),
    "an index without its files": (
        model(index_without_its_files),
        ["model-00001-of-00001.safetensors, which model.safetensors.index.json names, is missing"],
    ),
    "a damaged index": (
        model(lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors.index.json").write_text("{}"))),
        ["model.safetensors.index.json is damaged"],
    ),
    "a critic that is not there": (
        dict(algo__advantage__estimator="gae", critic__model_name_or_path="/nowhere/critic"),
        ["--critic.model_name_or_path /nowhere/critic: no such folder"],
    ),
    "the first of two reward models": (
        lambda d, _: dict(reward__remote_url=None, reward__model_name_or_path=f"/nowhere/reward,{d}/model"),
        ["--reward.model_name_or_path /nowhere/reward: no such folder"],
    ),
    "a reward file without reward_func": (
        reward("def reward(queries, prompts, labels): ...\n"),
        ["--reward.remote_url", "wrong.py: cannot be loaded (AttributeError", "defines reward_func"],
    ),
    "a reward file with a syntax error": (reward("def reward_func(:\n"), ["wrong.py: cannot be loaded (SyntaxError"]),
    "a reward file with a missing import": (
        reward("import no_such_module\n"),
        ["wrong.py: cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')"],
    ),
    "a reward_func that is none": (
        reward("reward_func = 3\n"),
        ["(TypeError: reward_func is not a function)"],
    ),
    "a reward file that ends the process": (reward("exit(0)\n"), ["wrong.py: cannot be loaded (it exits with 0)"]),
    "a reward file that never loads": (never_loaded, ["wrong.py: is still loading after 3 s"]),
    "an agent with a syntax error": (
        agent("class AgentExecutor(:\n"),
        ["--train.agent_func_path", "agent.py: cannot be loaded (SyntaxError", "defines AgentExecutor"],
    ),
    "an agent file without AgentExecutor": (agent("x = 1\n"), ["agent.py: cannot be loaded (AttributeError"]),
    "an AgentExecutor without OpenRLHF's base class": (
        agent("class AgentExecutor: ...\n"),
        ["agent.py: cannot be loaded (TypeError: AgentExecutor is not an openrlhf.utils.agent.AgentExecutorBase)"],
    ),
    "an agent file that is no Python": (
        file("train.agent_func_path", "agent.txt", "", reward__remote_url=None),
        ["agent.txt: allowed: an agent file (.py)"],
    ),
    "a file as folder of checkpoints": (
        lambda d, _: dict(ckpt__path=d / "train.jsonl/ckpt"),
        ["--ckpt.path", "train.jsonl/ckpt: cannot be written", "Not a directory"],
    ),
    "a resume from a folder without a checkpoint": (
        lambda d, _: (d / "ckpt/_actor").mkdir(parents=True) or dict(ckpt__load_enable=True),
        ["--ckpt.load_enable: --ckpt.path ", "has no checkpoint in "],
    ),
    "a resume of a checkpoint that is cut off": (
        lambda d, m: checkpoint("global_step2")(d, m) | cut_off(d / "ckpt/_actor/global_step2"),
        ["--ckpt.load_enable: no checkpoint of --ckpt.path ", "zero_pp_rank_0_mp_rank_00_optim_states.pt is cut off"],
    ),
    "a resume on a CPU of a checkpoint in bf16": (
        checkpoint("global_step2", "bf16_"),
        ["--ds.param_dtype fp32: ", "global_step2 is in bf16; allowed: bf16"],
    ),
    "a resume in bf16 of a checkpoint in fp32": (
        checkpoint("global_step2", ds__param_dtype="bf16"),
        ["--ds.param_dtype bf16: ", "global_step2 is in fp16 or fp32; allowed: fp16 or fp32"],
    ),
    "fp16 on a CPU": (dict(ds__param_dtype="fp16"), ["--ds.param_dtype fp16: ", "allowed: fp32, bf16"]),
    "fp32 on a GPU": (
        on_two_gpus(ds__param_dtype="fp32"),
        ["--ds.param_dtype fp32: is for CPUs; allowed with GPUs: bf16, fp16"],
    ),
    "flash attention on a GPU without the package": (
        on_two_gpus(ds__attn_implementation="flash_attention_2"),
        ["--ds.attn_implementation flash_attention_2: needs the package flash-attn", "sdpa, eager"],
    ),
    "packed samples on a GPU without flash-attn": (
        on_two_gpus(ds__packing_samples=True),
        ["--ds.attn_implementation sdpa: needs the package flash-attn", "for --ds.packing_samples"],
    ),
    "a resume without its pool": (
        checkpoint("global_step2", replay__ratio=1),
        ["_replay/global_step2", "--replay.discard_saved"],
    ),
    "a resume with a damaged pool": (damaged_pool, ["groups.safetensors is damaged", "--replay.discard_saved"]),
    "a resume with another estimator": (
        saved_pool(algo__advantage__estimator="rloo"),
        [
            "--algo.advantage.estimator 'group_norm', but this run has --algo.advantage.estimator 'rloo'",
            "discard_saved",
        ],
    ),
    "a resume with a KL loss": (
        saved_pool(algo__kl__use_loss=True, algo__kl__init_coef=0.01, algo__kl__estimator="k3"),
        ["--algo.kl.use_loss 'False', but this run has --algo.kl.use_loss 'True'", "--replay.discard_saved"],
    ),
    "a Ray that is not there": (ray_address("127.0.0.1:{}"), ["RAY_ADDRESS 127.0.0.1:", "no Ray cluster answers"]),
    "a Ray client's server that is not there": (ray_address("ray://127.0.0.1:{}"), ["RAY_ADDRESS ray://127.0.0.1:"]),
    "no Ray on this machine": (ray_address("auto"), ["RAY_ADDRESS auto: no Ray cluster answers there"]),
    "an address that is none": (ray_address("head"), ["RAY_ADDRESS head: no Ray cluster answers there"]),
}

TABLE = {
    **{f"--{flag} {value}": ({flag: value}, [f"--{flag}", str(value), said]) for flag, value, said in VALUES},
    **COMMANDS,
    **FILES,
}

# Mistakes that pass, and why no check can find them before Ray starts.
UNKNOWABLE = {
    "a hub model that does not exist": (
        dict(actor__model_name_or_path="nobody/nothing"),
        "the hub alone knows",
    ),
    "a hub data set that does not exist": (dict(data__prompt_dataset="nobody/nothing"), "the hub alone knows"),
    "a reward server that is down": (
        dict(reward__remote_url="http://127.0.0.1:1/get_reward"),
        "it may be up when the first response is there",
    ),
    "a reward function that fails": (
        reward("def reward_func(queries, prompts, labels):\n    raise ValueError\n"),
        "it fails when it is called, with the run's own responses",
    ),
    "weights of another shape": (
        model(edit("config.json", intermediate_size=128)),
        "what shape a weight must have is known to the model's code alone",
    ),
    "a null in the middle of a large file": (
        prompts(LARGE + '{"input": null, "label": "3"}\n' + LARGE),
        "large files are read at both ends only",
    ),
}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Path:
    directory = pipeline.make_model(tmp_path_factory.mktemp("baseline"))
    # Without torch, which takes a second and a half to import.
    (directory / "reward.py").write_text("def reward_func(queries, prompts, labels, **kwargs): ...\n")
    return directory


@pytest.fixture
def directory(baseline, tmp_path) -> Path:
    shutil.copytree(baseline, tmp_path, dirs_exist_ok=True)
    return tmp_path


SEVERAL = (
    "--actor.adam.betas",
    "--reward.clip_range",
    "--algo.dynamic_filtering_range",
    "--ds.lora.target_modules",
)


def argv(directory: Path, changes: dict) -> list[str]:
    """The baseline's flags with changes; a value of several words becomes several arguments."""
    changes = {name.replace(".", "__"): value for name, value in changes.items()}
    argv = []
    for argument in pipeline.flags(directory, **changes):
        several = argv and argv[-1] in SEVERAL
        argv += argument.split() if several else [argument]
    return argv


def said_by(arguments_: list[str], depth: int = checks.MACHINE) -> tuple[int | None, list[str], list[str]]:
    """Exit code (None: it passes), errors and warnings, a line each."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
        try:
            arguments.parse(arguments_, depth)
            code = None
        except SystemExit as exit_:
            code = exit_.code
    lines = stderr.getvalue().splitlines()
    warnings = [line for line in lines if line.startswith("openrlhf-bapo: warning: ")]
    return code, [line for line in lines if line not in warnings], warnings


def test_the_baseline_passes_without_a_word(directory):
    assert said_by(argv(directory, {})) == (None, [], [])


@pytest.mark.parametrize("row", TABLE)
def test_a_wrong_input_is_one_line_with_the_flag_and_its_value(directory, monkeypatch, row):
    fault, said = TABLE[row]
    changes = fault(directory, monkeypatch) if callable(fault) else fault
    code, errors, _ = said_by(argv(directory, changes))
    assert code == 2 and len(errors) == 1 and errors[0].startswith("openrlhf-bapo: "), errors
    assert all(part in errors[0] for part in said), errors


def test_at_least_95_percent_of_the_known_mistakes_are_found():
    assert len(TABLE) >= 120 and len(TABLE) / (len(TABLE) + len(UNKNOWABLE)) >= 0.95


@pytest.mark.parametrize("row", UNKNOWABLE)
def test_a_mistake_that_no_check_can_find_passes(directory, monkeypatch, row):
    fault, _ = UNKNOWABLE[row]
    changes = fault(directory, monkeypatch) if callable(fault) else fault
    code, errors, _ = said_by(argv(directory, changes))
    assert (code, errors) == (None, [])


WARNINGS = {
    "a hub model": (
        dict(actor__model_name_or_path="nobody/nothing"),
        "nobody/nothing: is not a folder here, so it",
    ),
    "a hub data set": (dict(data__prompt_dataset="nobody/nothing"), "nobody/nothing: is not a file or folder here, so"),
    "evaluation steps": (dict(eval__steps=5), "--eval.steps 5 does nothing without --eval.dataset"),
    "learning rate": (dict(actor__adam__lr=1.0), "--actor.adam.lr 1.0 is a high learning rate"),
    "one checkpoint": (dict(ckpt__max_num=1, ckpt__save_steps=5), "--ckpt.max_num 1: OpenRLHF removes the only"),
    "nothing to resume": (dict(ckpt__load_enable=True), "has no checkpoint; the run starts from step 0"),
    "a resume without a checkpoint's name": (
        checkpoint(None),
        "resumes global_step2, because ",
    ),
    "a resume whose checkpoint is gone": (
        checkpoint("global_step4"),
        "ckpt/_actor/latest names 'global_step4', which does not exist",
    ),
    "not resumed": (
        lambda d, m: checkpoint("global_step2")(d, m) | dict(ckpt__load_enable=None),
        "has checkpoints, but without --ckpt.load_enable the run ignores them",
    ),
    "no EOS": (model(tokens_of_a_llama(eos_token=None)), "its tokenizer has no EOS token"),
    "more tokens than embeddings": (model(edit("config.json", vocab_size=9)), "has 17 tokens, its model 9"),
    "a reward beside an agent": (
        lambda d, _: dict(train__agent_func_path=pipeline.SUPPORT / "scripted_agent.py"),
        "reward.py does nothing with --train.agent_func_path",
    ),
}


@pytest.mark.parametrize("row", WARNINGS)
def test_a_probable_mistake_is_one_warning(directory, monkeypatch, row):
    fault, said = WARNINGS[row]
    changes = fault(directory, monkeypatch) if callable(fault) else fault
    code, errors, warnings = said_by(argv(directory, changes))
    assert (code, errors, len(warnings)) == (None, [], 1) and said in warnings[0], warnings


@pytest.mark.parametrize(
    "changes",
    [
        dict(replay__ratio=0, replay__capacity=7),  # a recipe's replay, switched off
        dict(replay__ratio=1, replay__max_staleness=1, replay__capacity=16),
        dict(ds__attn_implementation="kernels-community/vllm-flash-attn3"),
        dict(reward__remote_url="http://127.0.0.1:5000/get_reward,https://[::1]/get_reward"),
        dict(rollout__temperature=0.6, eval__dataset="train.jsonl", eval__temperature=0, rollout__top_p=0.5),
        dict(ckpt__save_steps=-1, eval__steps=-1, actor__adam__lr=0),
        dict(algo__advantage__estimator="gae", algo__kl__init_coef=0.1),
        dict(ckpt__path="made/by/the/run"),
        dict(data__input_template="Q: {} Put it into \\boxed{{}}.", ds__grad_accum_dtype="float32"),
    ],
    ids=lambda changes: " ".join(changes),
)
def test_correct_flags_pass_without_a_word(directory, monkeypatch, changes):
    monkeypatch.chdir(directory)
    assert said_by(argv(directory, changes)) == (None, [], [])
    assert not (directory / "made").exists()  # the check for write access leaves nothing behind


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.json", '[\n  {"input": "1+2=", "label": "3"},\n  {"input": "2+2=", "label": "4"}\n]\n'),
        ("prompts.jsonl", '{\n  "input": "1+2=",\n  "label": "3"\n}\n'),
        ("prompts.jsonl", f"\n{ROW}\n\n{ROW}\n"),
        ("prompts.jsonl", LARGE),
        ("prompts.csv", "input,label\n1+2=,3\n"),
        ("prompts.csv", "\ufeffinput,label\n1+2=,3\n"),
        ("prompts.csv", "input,x,x,label\n1+2=,a,b,3\n"),
        ("prompts.jsonl", f"\ufeff{ROW}{ROW}"),
        ("prompts.jsonl", f"\ufeff{LARGE}"),
        ("prompts.json", f"\ufeff[{ROW}]"),
        ("prompts.jsonl", ROW + '{"input": "\\ud835\\udfd9", "label": "3"}'),
    ],
)
def test_every_data_file_that_openrlhf_can_read_passes(directory, name, content):
    """OpenRLHF's own loading decides."""
    from datasets import load_dataset

    (directory / name).write_text(content)
    kind = {"jsonl": "json"}.get(name.split(".")[1], name.split(".")[1])
    rows = load_dataset(kind, data_files=str(directory / name), cache_dir=str(directory / "cache"))["train"]
    assert {key: rows[0][key] for key in ("input", "label")} == {"input": "1+2=", "label": 3 if kind == "csv" else "3"}
    assert said_by(argv(directory, {"data.prompt_dataset": directory / name})) == (None, [], [])


@pytest.mark.parametrize("name", ["prompts.parquet", "prompts.arrow", "stream.arrow", "prompts.saved", "folder"])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_table_passes_whatever_type_of_text_and_format_it_has(directory, name, kind):
    inputs = pyarrow.array(["1+2=", "1+3="])
    inputs = inputs.dictionary_encode() if kind == "dictionary" else inputs.cast(kind)
    make_table(directory / name, pyarrow.table({"input": inputs, "label": ["3", "4"]}))
    assert said_by(argv(directory, {"data.prompt_dataset": directory / name})) == (None, [], [])


@pytest.mark.parametrize("name", ["prompts.parquet", "prompts.arrow", "stream.arrow", "prompts.saved", "folder"])
def test_messages_in_a_table_pass_with_a_chat_template(directory, name):
    edit("tokenizer_config.json", chat_template="{{ messages[0].content }}")(directory / "model")
    make_table(directory / name, pyarrow.table({"input": [MESSAGES], "label": ["3"]}))
    changes = {"data.prompt_dataset": directory / name, "data.apply_chat_template": True, "data.max_samples": 8}
    assert said_by(argv(directory, changes)) == (None, [], [])


CACHES = ("HF_DATASETS_CACHE", "VLLM_CACHE_ROOT", "TORCH_EXTENSIONS_DIR")


@pytest.mark.parametrize(
    ("cache", "home"), zip(CACHES, ("/proc/nowhere", "/dev/null/home", "/proc/nowhere"), strict=True)
)
def test_a_home_that_cannot_be_written_is_refused_with_the_cache_and_its_variable(directory, home, cache):
    """Its libraries read the environment when they are imported, so each case is a process."""
    environment = {name: str(directory / name) for name in CACHES if name != cache} | {"HOME": home}
    environment = {name: value for name, value in os.environ.items() if name not in CACHES} | environment
    program = [sys.executable, "-m", "openrlhf_bapo.cli.main", "train", *argv(directory, {})]
    run = subprocess.run(program, capture_output=True, text=True, cwd=directory, env=environment)
    line = run.stderr.splitlines()[-1]
    assert run.returncode == 2 and line.startswith(f"openrlhf-bapo: {cache} {home}/.cache/"), run.stderr
    assert "cannot be written (" in line and line.endswith(f"allowed: another {cache}, or a HOME that can be written")


def test_the_reward_file_is_loaded_once_beside_openrlhf_and_ends_with_the_checks(directory, monkeypatch):
    """Its imports may take as long as OpenRLHF's."""
    loads = directory / "loads"
    (directory / "reward.py").write_text(
        f"import os, time\nprint(os.getpid(), file=open({str(loads)!r}, 'a'), flush=True)\n"
        "def reward_func(queries, prompts, labels, **kwargs): ...\n"
    )
    upstream = arguments.register

    def register() -> None:  # runs before OpenRLHF's imports
        while not loads.exists() or not loads.read_text().endswith("\n"):
            time.sleep(0.01)
        upstream()

    monkeypatch.setattr(arguments, "register", register)
    assert said_by(argv(directory, {})) == (None, [], [])
    (process,) = loads.read_text().split()
    assert not Path("/proc", process).exists()

    loads.unlink()
    with (directory / "reward.py").open("a") as file:
        file.write("time.sleep(1000)\n")
    code, errors, _ = said_by(argv(directory, {"actor.dual_clip": 0.5}))
    assert code == 2 and "--actor.dual_clip" in errors[0]  # not waited for
    (process,) = loads.read_text().split()
    assert not Path("/proc", process).exists()


def test_a_dry_run_needs_neither_data_nor_model_but_checks_those_that_exist(directory):
    missing = {"actor.model_name_or_path": "/later/model", "data.prompt_dataset": "/later/prompts.jsonl"}
    code, errors, warnings = said_by(argv(directory, missing | {"ckpt.path": "/proc/nowhere"}), checks.FILES)
    assert (code, errors) == (None, []) and "does not exist yet" in warnings[0]
    (directory / "prompts.jsonl").write_text("oops\n")
    code, errors, _ = said_by(argv(directory, {"data.prompt_dataset": directory / "prompts.jsonl"}), checks.FILES)
    assert code == 2 and "prompts.jsonl: line 1 is not JSON" in errors[0]


@pytest.mark.parametrize(
    ("asked", "num_gpus", "flag"),
    [
        ({"actor": 8, "engines": 8}, 8, "--actor.num_gpus_per_node"),
        ({"actor": 2, "engines": 8}, 8, "--vllm.num_engines"),
        ({"actor": 1, "engines": 1, "reference": 8}, 8, "--ref.num_gpus_per_node"),
    ],
)
def test_too_many_gpus_are_refused_with_the_flag_that_asks_for_most(asked, num_gpus, flag):
    with pytest.raises(checks.FlagError, match=f"{flag}: the run asks for {sum(asked.values())} GPUs .*the 8 of"):
        checks.check_gpus(asked, num_gpus)
    checks.check_gpus(asked, sum(asked.values()))


def test_critic_and_reward_model_have_gpus_of_their_own_where_they_share_them(directory):
    changes = dict(train__colocate_all=True, train__colocate_critic_reward=True, algo__advantage__estimator="gae")
    args = arguments.parse(argv(directory, changes))
    assert checks.gpu_groups(args) == {"actor": 1, "critic": 1}


@pytest.mark.parametrize("row", ["no config", "no tokenizer", "neither EOS nor pad", "no weights", "empty weights"])
def test_an_evaluation_refuses_the_same_models(directory, monkeypatch, capsys, row):
    fault, (*_, said) = FILES[row]
    fault(directory, monkeypatch)
    files = ["--model", directory / "model", "--data", directory / "train.jsonl", "--out", directory / "out"]
    with pytest.raises(SystemExit) as exit_:
        evaluate.main([*map(str, files)])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and line.startswith("openrlhf-bapo: --model ") and said in line
    assert not (directory / "out").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(train__batch_size=20), "--train.batch_size 20: must be a multiple of 8, "),
        (dict(reward__remote_url="nowhere.py"), "--reward.remote_url nowhere.py: no such file"),
        (
            dict(train__partial_rollout_enable=True, ckpt__save_steps=1, ckpt__max_num=10**9),
            "--train.partial_rollout_enable requires --train.async_enable.",
        ),
    ],
    ids=["a flag", "a file", "OpenRLHF's refusal"],
)
def test_the_command_itself_ends_with_that_line_and_code_2(directory, command, changes, said):
    program = [pipeline.warm_python(), "-m", "openrlhf_bapo.cli.main", command, *argv(directory, changes)]
    environment = os.environ | {"RAY_TMPDIR": str(directory)}
    run = subprocess.run(program, capture_output=True, text=True, cwd=directory, env=environment)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith(f"openrlhf-bapo: {said}")
    assert "Traceback" not in run.stderr and not (directory / "ray").exists()
    if "ckpt__max_num" in changes and command == "train":  # OpenRLHF refuses after our checks
        assert f"warning: --ckpt.path {directory}/ckpt: a run writes " in run.stderr
