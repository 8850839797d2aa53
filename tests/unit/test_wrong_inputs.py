"""A user's mistake ends in one line with the flag and its value, and exit code 2, before Ray starts.

Each row changes one command that passes, so that it can only fail because of this change. test_flags.py has the rows
that need no files.
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
import refusals
import torch

from openrlhf_bapo.cli import evaluate
from openrlhf_bapo.flags import arguments, checks, input_files
from openrlhf_bapo.offpolicy.replay_pool import Group, ReplayConfig, ReplayPool
from openrlhf_bapo.openrlhf.replay_checkpoint import _replay_fingerprint

FLAGS = r"""
--data.max_len 4096 => : the model has 128 positions
--actor.aux_loss_coef 0.001 => : a qwen2 has no such loss; allowed: 0
--actor.model_name_or_path /nowhere/model => : no such folder
--actor.model_name_or_path runs/nowhere/model => : no such folder
--data.prompt_dataset nowhere.jsonl => : no such file
--data.prompt_dataset /nowhere/prompts => : no such file
--eval.dataset nowhere.jsonl => : no such file
--data.input_key question
    => --data.prompt_dataset ... has no key 'question'; allowed for --data.input_key: one of input, label
--data.label_key answer
    => --data.prompt_dataset ... has no key 'answer'; allowed for --data.label_key: one of input, label
--reward.remote_url nowhere.py => : no such file
--reward.remote_url reward.txt => : allowed: a reward-function file (.py), or HTTP URLs
--reward.remote_url localhost:5000/get_reward => : allowed: a reward-function file (.py), or HTTP URLs
--reward.remote_url http://a/get_reward,nowhere.py => : allowed: a reward-function file (.py), or HTTP URLs
--reward.remote_url http://a:port/get_reward => : allowed: a reward-function file (.py), or HTTP URLs
--train.agent_func_path nowhere.py => : no such file
--ckpt.path /proc/nowhere => : cannot be written (/proc:
--ckpt.output_dir /proc/nowhere/model => : cannot be written (/proc:
--logger.tensorboard_dir /dev/null/tensorboard => : cannot be written (/dev/null:
--policy_loss bapo --data.max_samples 7
    => --data.prompt_dataset ... 7 prompts x --rollout.n_samples_per_prompt 4 fill no optimizer step ... 32
--replay.ratio 1 --replay.discard_saved => : does nothing without --ckpt.load_enable
--partial.token_budget 4 --partial.discard_saved => : does nothing without --ckpt.load_enable
--policy_loss bapo --bapo.smoothing 20 --bapo.discard_saved => : does nothing without --ckpt.load_enable
--data.apply_chat_template => --data.apply_chat_template ... has no chat template
--use_ms => : needs the package modelscope, which is not installed
--ds.lora.rank 8 --ds.lora.target_modules q_proj query
    => --ds.lora.target_modules query: the model has no such module; allowed: all-linear, ... q_proj,
--vllm.tensor_parallel_size 4 => --vllm.tensor_parallel_size 4 ... 2 attention heads
--ckpt.path {d}/train.jsonl/ckpt => --ckpt.path ... train.jsonl/ckpt: cannot be written ... Not a directory
--ds.param_dtype fp16 => : ... allowed: fp32, bf16
--algo.advantage.estimator gae --critic.model_name_or_path /nowhere/critic => : no such folder
~reward.remote_url --reward.model_name_or_path /nowhere/reward,{d}/model
    => --reward.model_name_or_path /nowhere/reward: no such folder
"""
WITH_GPUS = """
--ds.param_dtype fp32 => : is for CPUs; allowed with GPUs: bf16, fp16
--ds.attn_implementation flash_attention_2 => : needs the package flash-attn ... sdpa, eager
--ds.packing_samples => --ds.attn_implementation sdpa: needs the package flash-attn ... for --ds.packing_samples
"""
ON_THE_CPU = "vllm.tensor_parallel_size ds.tensor_parallel_size ds.ring_attn_size".split()


def file(flags: str, name: str, content: str | bytes):
    """A fault: a file with this content, which `flags` name."""

    def fault(directory: Path, _) -> str:
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"{flags} {directory / name}"

    return fault


def prompts(content: str | bytes, name: str = "prompts.jsonl"):
    return file("--data.prompt_dataset", name, content)


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


def table(name: str, *columns: tuple[str, list]):
    """A fault: prompts in a table of this format, with these columns."""

    def fault(directory: Path, _) -> str:
        names, values = zip(*columns, strict=True)
        make_table(directory / name, pyarrow.Table.from_arrays([pyarrow.array(x) for x in values], list(names)))
        return f"--data.prompt_dataset {directory / name}"

    return fault


def reward(content: str):
    return file("--reward.remote_url", "wrong.py", content)


def never_loaded(directory: Path, monkeypatch) -> str:
    monkeypatch.setattr(input_files, "LOAD_LIMIT", 3)
    return reward("while True: pass\n")(directory, monkeypatch)


def agent(content: str, name: str = "agent.py"):
    return file("~reward.remote_url --train.agent_func_path", name, content)


def model(change, flags: str = ""):
    """A fault: `change(folder)` of the model's folder."""

    def fault(directory: Path, _) -> str:
        change(directory / "model")
        return flags

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


def with_other_tokens(flag: str, others: str):
    """A fault: a model of this flag in whose tokenizer the digits 1 and 2 are exchanged."""

    def fault(directory: Path, _) -> str:
        other = shutil.copytree(directory / "model", directory / "other")
        known = json.loads((other / "tokenizer.json").read_text())
        vocabulary = known["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
        (other / "tokenizer.json").write_text(json.dumps(known))
        return f"--{flag} {other} {others}"

    return fault


def without(name: str):
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def text(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def as_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_config.json")


def index(**content):
    """An index in place of the weights."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def checkpoint(flags: str, prefix: str = ""):
    """A fault: a command beside a checkpoint whose optimizer files have this prefix."""

    def fault(directory: Path, _) -> str:
        pipeline.make_checkpoint(directory / "ckpt/_actor/global_step2", zero_stage=2, prefix=prefix)
        (directory / "ckpt/_actor/latest").write_text("global_step2")
        return flags

    return fault


def on_two_gpus(flags: str):
    """A fault on a machine where torch finds two GPUs, without flash-attn."""

    def fault(_, monkeypatch) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        return flags

    return fault


def saved_pool(flags: str):
    """A fault: a resume with other settings than those that the pool was saved with."""

    def fault(directory: Path, monkeypatch) -> str:
        sample = {"tokens": torch.arange(4), **{name: torch.ones(3) for name in ("action_mask", "advantages")}}
        sample |= {"behavior_log_probs": torch.zeros(3), "versions": torch.zeros(3)}
        pool = ReplayPool(ReplayConfig(ratio=1.0))
        pool.add([Group([dict(sample) for _ in range(4)], torch.arange(4.0))])
        before = pipeline.parse(pipeline.flags(directory, replay__ratio=1))
        state = {"policy_version": 2, "steps_by_version": [0, 1, 2]}
        pool.save(directory / "ckpt/_replay/global_step2", state, _replay_fingerprint(before))
        return checkpoint(f"--ckpt.load_enable --replay.ratio 1 {flags}")(directory, monkeypatch)

    return fault


def ray_address(value: str):
    def fault(directory: Path, monkeypatch) -> str:
        monkeypatch.setenv("RAY_TMPDIR", str(directory))
        monkeypatch.setenv("RAY_ADDRESS", value.format(pipeline.free_port()))
        return ""

    return fault


ROW = '{"input": "1+2=", "label": "3"}\n'
LARGE = ROW * (9 << 20 >> 5)  # more than is read whole
TABLES = ("prompts.parquet", "prompts.arrow", "stream.arrow", "prompts.saved", "folder")

# What is said of prompts.jsonl, and its content.
JSONL = [
    ("prompts.jsonl: has no rows ... --data.prompt_dataset", ""),
    ("prompts.jsonl: has no rows", "\n\n"),
    ("prompts.jsonl: line 2 is not JSON", ROW + "1+2=\n"),
    ("prompts.jsonl: line 4 is not JSON", ROW * 3 + ROW[:20]),
    ("prompts.jsonl: cannot be read", b"\xff\xfe\x00"),
    ("prompts.jsonl: line 1 is not a JSON object", '"1+2="\n'),
    ("line 2 has 'input' null ... --data.input_key", ROW + '{"input": null, "label": "3"}\n' + ROW),
    ("prompts.jsonl: line 1 has 'input' \"\"", '{"input": "", "label": "3"}\n'),
    ("prompts.jsonl: line 1 has 'input' 3", '{"input": 3, "label": "3"}\n'),
    (
        "line 1 has 'input' [{ ... allowed for --data.input_key: a text",
        '{"input": [{"role": "user", "content": "1+2="}], "label": "3"}\n',
    ),
    ("line 2 has no key 'label'; allowed for --data.label_key: one of input", ROW + '{"input": "1+2="}\n'),
    ("prompts.jsonl: a row at its end is not JSON", LARGE + ROW[:20]),
    ("prompts.jsonl: line 1 is not JSON", "oops\n" + LARGE),
    (r"a row at its end has \ud835, half of a character", LARGE + '{"input": "\\ud835", "label": "3"}\n'),
    ("line 2 is not JSON (Expecting value", ROW + "\ufeff" + ROW),
]
# What is said of a row in the middle of JSON, and the row.
ROWS = [
    (r"has \ud835, half of a character", '{"input": "1+\\ud835=", "label": "3"}'),
    (r"has \udc00, half", '{"input": "1", "label": "3", "x": {"y": ["\\udc00"]}}'),
    (r"has \ud800, half", '{"input": "1+2=", "label": "3", "\\ud800": 1}'),
    ("has the key 'input' twice; allowed", '{"input": "1+2=", "input": "1+3=", "label": "3"}'),
    ("has the key 'y'", '{"input": "1", "label": "3", "x": [{"y": 1, "y": 2}]}'),
]
# What is said of the last prompt of a table, and its prompts.
CELLS = [('[{"role', [MESSAGES]), ("null", ["1+2=", None]), ('""', ["1+2=", "1+3=", ""]), ("3", [3])]
# What is said of prompts.csv, and its content.
CSV = [
    ("prompts.csv: its table has no key 'input'", "question,label\n1+2=,3\n"),
    ("prompts.csv: has no rows", "input,label\n\n"),
    ("row 1 has 'input' 12", "input,label\n12,3\n"),
    ("row 2 has 'input' null", "input,label\n1+2=,3\n,4\n"),
    ("prompts.csv: its table has the column 'input' twice", "input,input,label\n1+2=,1+3=,3\n"),
]
# What is said of the model, and the change of its folder.
MODELS = [
    ("is a LoRA adapter; allowed: a whole model, which python -m openrlhf.cli.lora", as_an_adapter),
    ("model: has no config.json", without("config.json")),
    ("model: its config.json cannot be loaded", cut("config.json", 100)),
    ("model: its config.json cannot ... qwen9", edit("config.json", model_type="qwen9")),
    ("model_type 'vit' is not a language", text("config.json", '{"model_type": "vit"}')),
    ("model: has no tokenizer", without("tokenizer.json")),
    ("model: its tokenizer cannot be loaded", cut("tokenizer.json", 100)),
    ("model: its tokenizer has neither an EOS nor a padding token", tokens_of_a_llama(eos_token=None, pad_token=None)),
    (
        "model: its EOS token '<|endoftext|>' is number 17; allowed: below the model's 17",
        edit("tokenizer_config.json", eos_token=None),  # transformers gives a Qwen2 without one its own
    ),
    ("model: has no weights", without("model.safetensors")),
    ("not a whole safetensors file ( ... not fully covered); copy it again", cut("model.safetensors", 100_000)),
    ("not a whole safetensors file ( ... invalid header length); copy it again", cut("model.safetensors", 100)),
    ("model.safetensors is not a whole safetensors file", cut("model.safetensors", 0)),
    (
        "model: model.safetensors is not a whole safetensors file",
        text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 147744\n"),
    ),
    (
        "model-00001-of-00001.safetensors, which model.safetensors.index.json names, is missing",
        index(weight_map={"lm_head.weight": "model-00001-of-00001.safetensors"}),
    ),
    ("model.safetensors.index.json is damaged", index()),
]
# What is said of a reward file, and its content.
REWARDS = [
    (
        "wrong.py: cannot be loaded (AttributeError ... defines reward_func",
        "def reward(queries, prompts, labels): ...\n",
    ),
    ("wrong.py: cannot be loaded (SyntaxError", "def reward_func(:\n"),
    ("(ModuleNotFoundError: No module named 'no_such_module')", "import no_such_module\n"),
    ("(TypeError: reward_func is not a function)", "reward_func = 3\n"),
    ("wrong.py: cannot be loaded (it exits with 0)", "exit(0)\n"),
    ("wrong.py: cannot be loaded (it exits with -9)", "import os\nos.kill(os.getpid(), 9)\n"),
    ("wrong.py: cannot be loaded (\ufffd!)", "import sys\nsys.stderr.buffer.write(b'\\xff!')\nsys.exit(1)\n"),
]
# What is said of an agent's file, and its content.
AGENTS = [
    ("agent.py: cannot be loaded (SyntaxError ... defines AgentExecutor", "class AgentExecutor(:\n"),
    ("agent.py: cannot be loaded (AttributeError", "x = 1\n"),
    ("(TypeError: AgentExecutor is not an openrlhf.utils.agent.AgentExecutorBase)", "class AgentExecutor: ...\n"),
]


# What is said of other faults.
def of_another_type(directory: Path, _) -> str:
    numbers = prompts('{"input": "1+2=", "label": 3}\n', "numbers.jsonl")(directory, None)
    return f"{numbers},{prompts(ROW)(directory, None).split()[1]}"


FAULTS = [
    ("--data.prompt_dataset ... the column 'label' has another type in one file than in the others", of_another_type),
    *((f"--data.prompt_dataset ... {said}", prompts(content)) for said, content in JSONL),
    *((f"--data.prompt_dataset ... {said}", prompts(content, "prompts.csv")) for said, content in CSV),
    *((f"prompts.jsonl: line 2 {said}", prompts(ROW + row)) for said, row in ROWS),
    *((f"prompts.json: row 2 {said}", prompts(f"[{ROW.strip()},\n{row}]", "prompts.json")) for said, row in ROWS),
    *(
        (
            f"{name}: ... row {len(values)} has 'input' {shown} ... allowed for --data.input_key: a text, not empty",
            table(name, ("input", values), ("label", ["3"] * len(values))),
        )
        for name in TABLES
        for shown, values in CELLS
    ),
    *((f"--actor.model_name_or_path ... {said}", model(change)) for said, change in MODELS),
    *((f"--reward.remote_url ... wrong.py: ... {said}", reward(content)) for said, content in REWARDS),
    *((f"--train.agent_func_path ... agent.py: ... {said}", agent(content)) for said, content in AGENTS),
    (
        "prompts.json: row 2 has no key 'input'",
        prompts('[{"input": "1+2=",\n "label": "3"}, {"prompt": "1+2="}]', "prompts.json"),
    ),
    ("prompts.parquet: has no rows; allowed: a file with at", table("prompts.parquet", ("input", []), ("label", []))),
    (
        "prompts.parquet: its table has the column 'x' twice",
        table("prompts.parquet", ("input", ["1+2="]), ("x", [1]), ("x", [2]), ("label", ["3"])),
    ),
    ("prompts.parquet: cannot be read", prompts(ROW, "prompts.parquet")),
    (
        "--eval.dataset ... heldout.jsonl: line 1 has no key 'label'",
        file("--eval.dataset", "heldout.jsonl", '{"input": "1+2="}\n'),
    ),
    (
        "--ds.lora.target_modules lm_head: the model has one weight for input and output",
        model(
            edit("config.json", tie_word_embeddings=True), "--ds.lora.rank 8 --ds.lora.target_modules q_proj lm_head"
        ),
    ),
    (
        "--ds.packing_samples: the layers of a qwen3_next would mix packed samples; allowed: without packing",
        model(edit("config.json", model_type="qwen3_next", layer_types=None), "--ds.packing_samples"),
    ),
    ("wrong.py: is still loading after 3 s", never_loaded),
    ("agent.txt: allowed: an agent file (.py)", agent("", "agent.txt")),
    (
        "--ckpt.load_enable: --ckpt.path ... has no checkpoint in ",
        lambda directory, _: (directory / "ckpt/_actor").mkdir(parents=True) or "--ckpt.load_enable",
    ),
    ("--ds.param_dtype fp32: ... is in bf16; allowed: bf16", checkpoint("--ckpt.load_enable", prefix="bf16_")),
    (
        "--ds.param_dtype bf16: ... global_step2 is in fp16 or fp32; allowed: fp16 or fp32",
        checkpoint("--ckpt.load_enable --ds.param_dtype bf16"),
    ),
    *((said, on_two_gpus(flags)) for flags, said in refusals.rows(WITH_GPUS)),
    (
        "--algo.advantage.estimator 'group_norm', but this run has --algo.advantage.estimator 'rloo' ... discard_saved",
        saved_pool("--algo.advantage.estimator rloo"),
    ),
    (
        "--algo.kl.use_loss 'False', but this run has --algo.kl.use_loss 'True' ... --replay.discard_saved",
        saved_pool("--algo.kl.use_loss --algo.kl.init_coef 0.01 --algo.kl.estimator k3"),
    ),
    (
        "--reward.model_name_or_path ... gets the actor's tokens, of which ... and its tokenizer has that as",
        with_other_tokens("reward.model_name_or_path", "~reward.remote_url"),
    ),
    (
        "--critic.model_name_or_path ... gets the actor's tokens, of which",
        with_other_tokens("critic.model_name_or_path", "--algo.advantage.estimator gae"),
    ),
    ("RAY_ADDRESS 127.0.0.1: ... no Ray cluster answers", ray_address("127.0.0.1:{}")),
    ("RAY_ADDRESS ray://127.0.0.1:", ray_address("ray://127.0.0.1:{}")),
    ("RAY_ADDRESS auto: no Ray cluster answers there", ray_address("auto")),
    ("RAY_ADDRESS head: no Ray cluster answers there", ray_address("head")),
]

# Mistakes that pass, and why no check can find them before Ray starts.
UNKNOWABLE = {
    "the hub alone knows its models": "--actor.model_name_or_path nobody/nothing",
    "the hub alone knows its data": "--data.prompt_dataset nobody/nothing",
    "a server may be up when the first response is there": "--reward.remote_url http://127.0.0.1:1/get_reward",
    "a reward function fails when it is called, with the run's own responses": reward(
        "def reward_func(queries, prompts, labels):\n    raise ValueError\n"
    ),
    "the model's code alone knows what shape a weight must have": model(edit("config.json", intermediate_size=128)),
    "large files are read at both ends only": prompts(LARGE + '{"input": null, "label": "3"}\n' + LARGE),
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


@pytest.fixture
def said_by(directory, monkeypatch):
    """Check a command: exit code (None: it passes), errors and warnings, a line each. A fault returns its flags."""

    def check(fault, depth: int = checks.MACHINE) -> tuple[int | None, list[str], list[str]]:
        argv = refusals.argv(directory, fault(directory, monkeypatch) if callable(fault) else fault)
        with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
            try:
                arguments.parse(argv, depth)
                code = None
            except SystemExit as exit_:
                code = exit_.code
        lines = stderr.getvalue().splitlines()
        warnings = [line for line in lines if line.startswith("openrlhf-bapo: warning: ")]
        return code, [line for line in lines if line not in warnings], warnings

    return check


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        *refusals.rows(FLAGS),
        *(
            (f"--{flag} 2 --actor.num_gpus_per_node 2", f"--{flag} 2: needs GPUs; allowed on the CPU: 1")
            for flag in ON_THE_CPU
            if not torch.cuda.is_available()
        ),
        *(pytest.param(fault, said, id=said) for said, fault in FAULTS),
    ],
)
def test_a_wrong_input_is_one_line_with_the_flag_and_its_value(said_by, fault, said):
    code, errors, _ = said_by(fault)
    assert code == 2 and len(errors) == 1 and errors[0].startswith("openrlhf-bapo: "), errors
    assert refusals.says(errors[0], said), errors


@pytest.mark.parametrize("reason", UNKNOWABLE)
def test_a_mistake_that_no_check_can_find_passes(said_by, reason):
    assert said_by(UNKNOWABLE[reason])[:2] == (None, [])


def in_a_template(prompt: str | list):
    """Data whose second prompt, of two, is this one, with a chat template."""

    def fault(directory: Path, _) -> str:
        edit("tokenizer_config.json", chat_template="{{ messages[0].content }}")(directory / "model")
        content = ROW + json.dumps({"input": prompt, "label": "3"})
        return f"{prompts(content)(directory, None)} --data.apply_chat_template"

    return fault


WARNINGS = [
    (
        "1 prompts have a chat template already, and get another one (line 2 has <|im_start|>)",
        in_a_template("<|im_start|>user\n1+2=<|im_end|>"),
    ),
    (
        "1 prompts have no message with the role user and a content; templates may leave out all others (line 2 has",
        in_a_template([{"from": "human", "value": "1+2="}]),
    ),
    (
        "1 prompts end with the assistant's answer, which the model sees (line 2 has",
        in_a_template([*MESSAGES, {"role": "assistant", "content": "3"}]),
    ),
    ("1 prompts are messages written as text, which the model gets as they are (line", in_a_template(str(MESSAGES))),
    ("nobody/nothing: is not a folder here, so it", "--actor.model_name_or_path nobody/nothing"),
    ("nobody/nothing: is not a file or folder here, so", "--data.prompt_dataset nobody/nothing"),
    ("--eval.steps 5 does nothing without --eval.dataset", "--eval.steps 5"),
    (
        "the best checkpoint has later weights than those that were evaluated; --ckpt.best_metric_key none writes none",
        "--train.async_enable --offpolicy.ratio_base auto --eval.dataset {d}/train.jsonl --eval.steps 2 "
        "--data.max_samples 1000",
    ),
    (
        "--data.max_samples 8: OpenRLHF evaluates on the first 8 of --eval.dataset's 9 rows too",
        file("--data.max_samples 8 --eval.dataset", "heldout.jsonl", ROW * 9),
    ),
    (
        "--data.max_samples 9: the 9 rows before train.jsonl in --data.prompt_dataset leave it out",
        lambda directory, monkeypatch: (
            monkeypatch.chdir(directory) or f"{prompts(ROW * 9)(directory, None)},train.jsonl --data.max_samples 9"
        ),
    ),
    ("--actor.adam.lr 1.0 is a high learning rate", "--actor.adam.lr 1"),
    (
        "--actor.lr_warmup_ratio 0.1 does nothing with --actor.lr_scheduler constant",
        "--actor.lr_scheduler constant --actor.lr_warmup_ratio 0.1",
    ),
    (
        "--critic.min_lr_ratio 0.5 does nothing with --critic.lr_scheduler linear",
        "--critic.lr_scheduler linear --critic.min_lr_ratio 0.5",
    ),
    (
        "--reward.overlong_buffer_len 4: penalizes responses of more than 20 tokens, and --data.max_len 24 cuts",
        "~rollout.max_new_tokens --reward.overlong_buffer_len 4",
    ),
    (
        "--train.batch_size 24 does not divide a rollout's 64 samples: those that fill no optimizer step add",
        "--train.batch_size 24",
    ),
    (
        "--train.batch_size 32 does not divide a rollout's 48 samples: those that fill no optimizer step are",
        "--policy_loss bapo --rollout.vllm_generate_batch_size 12",
    ),
    ("--ckpt.max_num 1: OpenRLHF removes the only", "--ckpt.max_num 1 --ckpt.save_steps 5"),
    ("has no checkpoint; the run starts from step 0", "--ckpt.load_enable"),
    ("has checkpoints, but without --ckpt.load_enable the run ignores them", checkpoint("")),
    ("its tokenizer has no EOS token", model(tokens_of_a_llama(eos_token=None))),
    ("has 17 tokens, its model 9", model(edit("config.json", vocab_size=9))),
    (
        "reward.py does nothing with --train.agent_func_path",
        f"--train.agent_func_path {pipeline.SUPPORT}/scripted_agent.py",
    ),
]


@pytest.mark.parametrize(("said", "fault"), WARNINGS, ids=[said for said, _ in WARNINGS])
def test_a_probable_mistake_is_one_warning(said_by, said, fault):
    code, errors, warnings = said_by(fault)
    assert (code, errors, len(warnings)) == (None, [], 1) and said in warnings[0], warnings


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--replay.ratio 0 --replay.capacity 7",  # a recipe's replay, switched off
        "--replay.ratio 1 --replay.max_staleness 1 --replay.capacity 16",
        "--ds.attn_implementation kernels-community/vllm-flash-attn3",
        "--reward.remote_url http://127.0.0.1:5000/get_reward,https://[::1]/get_reward",
        "--rollout.temperature 0.6 --eval.dataset train.jsonl --eval.temperature 0 --data.max_samples 1000",
        "--data.prompt_dataset train.jsonl,train.jsonl --data.prompt_probs 0.5,0.5 --rollout.top_p 0.5",
        "--ckpt.save_steps -1 --eval.steps -1 --actor.adam.lr 0",
        "--train.async_enable --offpolicy.ratio_base auto --eval.dataset train.jsonl --eval.steps 2 "
        "--data.max_samples 1000 --ckpt.best_metric_key none",
        "--algo.advantage.estimator gae --algo.kl.init_coef 0.1",
        "--ckpt.path made/by/the/run",
        r"--data.input_template 'Q: {} Put it into \boxed{{}}.' --ds.grad_accum_dtype float32",
    ],
)
def test_correct_flags_pass_without_a_word(directory, monkeypatch, said_by, flags):
    monkeypatch.chdir(directory)
    assert said_by(flags) == (None, [], [])
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
def test_every_data_file_that_openrlhf_can_read_passes(directory, said_by, name, content):
    """OpenRLHF's own loading decides."""
    from datasets import load_dataset

    (directory / name).write_text(content)
    kind = {"jsonl": "json"}.get(name.split(".")[1], name.split(".")[1])
    rows = load_dataset(kind, data_files=str(directory / name), cache_dir=str(directory / "cache"))["train"]
    assert {key: rows[0][key] for key in ("input", "label")} == {"input": "1+2=", "label": 3 if kind == "csv" else "3"}
    assert said_by(f"--data.prompt_dataset {directory / name}") == (None, [], [])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_table_passes_whatever_type_of_text_and_format_it_has(directory, said_by, name, kind):
    inputs = pyarrow.array(["1+2=", "1+3="])
    inputs = inputs.dictionary_encode() if kind == "dictionary" else inputs.cast(kind)
    make_table(directory / name, pyarrow.table({"input": inputs, "label": ["3", "4"]}))
    assert said_by(f"--data.prompt_dataset {directory / name}") == (None, [], [])


@pytest.mark.parametrize("name", TABLES)
def test_messages_in_a_table_pass_with_a_chat_template(directory, said_by, name):
    edit("tokenizer_config.json", chat_template="{{ messages[0].content }}")(directory / "model")
    make_table(directory / name, pyarrow.table({"input": [MESSAGES], "label": ["3"]}))
    flags = f"--data.prompt_dataset {directory / name} --data.apply_chat_template --data.max_samples 8"
    assert said_by(flags) == (None, [], [])


CACHES = ("HF_DATASETS_CACHE", "VLLM_CACHE_ROOT", "TORCH_EXTENSIONS_DIR")


@pytest.mark.parametrize(
    ("cache", "home"), zip(CACHES, ("/proc/nowhere", "/dev/null/home", "/proc/nowhere"), strict=True)
)
def test_a_home_that_cannot_be_written_is_refused_with_the_cache_and_its_variable(directory, home, cache):
    """Its libraries read the environment when they are imported, so each case is a process."""
    environment = {name: str(directory / name) for name in CACHES if name != cache} | {"HOME": home}
    environment = {name: value for name, value in os.environ.items() if name not in CACHES} | environment
    program = [sys.executable, "-m", "openrlhf_bapo.cli.main", "train", *refusals.argv(directory)]
    run = subprocess.run(program, capture_output=True, text=True, cwd=directory, env=environment)
    line = run.stderr.splitlines()[-1]
    assert run.returncode == 2 and line.startswith(f"openrlhf-bapo: {cache} {home}/.cache/"), run.stderr
    assert "cannot be written (" in line and line.endswith(f"allowed: another {cache}, or a HOME that can be written")


def test_the_reward_file_is_loaded_once_beside_openrlhfs_imports_and_ends_with_the_checks(
    directory, said_by, monkeypatch
):
    loads, upstream = directory / "loads", arguments.runpy.run_module

    def run_module(*args, **kwargs):  # OpenRLHF's imports begin when the file is loading
        while not loads.exists() or not loads.read_text().endswith("\n"):
            time.sleep(0.01)
        return upstream(*args, **kwargs)

    monkeypatch.setattr(arguments.runpy, "run_module", run_module)
    (directory / "reward.py").write_text(
        f"import os, time\nprint(os.getpid(), file=open({str(loads)!r}, 'a'), flush=True)\n"
        "def reward_func(queries, prompts, labels, **kwargs): ...\n"
    )
    assert said_by("") == (None, [], [])
    (process,) = loads.read_text().split()
    assert not Path("/proc", process).exists()
    with (directory / "reward.py").open("a") as file:
        file.write("time.sleep(1000)\n")
    assert "no such file" in said_by("--data.prompt_dataset nowhere.jsonl")[1][0]  # does not wait for it


def test_a_dry_run_needs_neither_data_nor_model_but_checks_those_that_exist(directory, said_by):
    missing = "--actor.model_name_or_path /later/model --data.prompt_dataset /later/prompts.jsonl"
    code, errors, warnings = said_by(f"{missing} --ckpt.path /proc/nowhere", checks.FILES)
    assert (code, errors) == (None, []) and "does not exist yet" in warnings[0]
    (directory / "prompts.jsonl").write_text("oops\n")
    code, errors, _ = said_by("--data.prompt_dataset {d}/prompts.jsonl", checks.FILES)
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
    flags = "--train.colocate_all --train.colocate_critic_reward --algo.advantage.estimator gae"
    args = arguments.parse(refusals.argv(directory, flags))
    assert checks.gpu_groups(args) == {"actor": 1, "critic": 1}


@pytest.mark.parametrize(("said", "change"), [row for row in MODELS if "has no" in row[0] or "neither" in row[0]])
def test_an_evaluation_refuses_the_same_models(directory, capsys, said, change):
    change(directory / "model")
    files = ["--model", directory / "model", "--data", directory / "train.jsonl", "--out", directory / "out"]
    line = pipeline.refusal(files, capsys, evaluate.main)
    assert line.startswith("--model ") and said in line
    assert not (directory / "out").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train.batch_size 20", "--train.batch_size 20: must be a multiple of 8, "),
        ("--reward.remote_url nowhere.py", "--reward.remote_url nowhere.py: no such file"),
        (
            "--train.partial_rollout_enable --ckpt.save_steps 1 --ckpt.max_num 1000000000",
            "--train.partial_rollout_enable requires --train.async_enable.",
        ),
    ],
)
def test_the_command_itself_ends_with_that_line_and_code_2(directory, command, flags, said):
    program = [pipeline.warm_python(), "-m", "openrlhf_bapo.cli.main", command, *refusals.argv(directory, flags)]
    environment = os.environ | {"RAY_TMPDIR": str(directory)}
    run = subprocess.run(program, capture_output=True, text=True, cwd=directory, env=environment)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith(f"openrlhf-bapo: {said}")
    assert "Traceback" not in run.stderr and not (directory / "ray").exists()
    if "--ckpt.max_num" in flags and command == "train":  # OpenRLHF refuses after our checks
        assert f"warning: --ckpt.path {directory}/ckpt: a run writes " in run.stderr
