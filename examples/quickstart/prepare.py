"""Makes the start of the quickstart: a tiny policy that does its task sometimes, training prompts and held-out prompts.

The tasks, by name:

* `chain_sum`: sums of two two-digit numbers from reasoning-gym. A prompt is the entry's expression without spaces,
  "48+95=", to keep sequences short. Its response is the answer, "143".
* `remainder`: division of numbers below 100 by repeated subtraction, with every step written down. Numbers start with
  their units, so that a borrow is known when it is needed: "79-22=" (97 and 22) has the response
  "57-22=35-22=13-22=90". The quotient q of two random numbers has a heavy tail (q >= x for about one prompt in x), and
  so has the response length of 6 q - 3 tokens: half of the responses have 3 tokens, one in a hundred about 300 or more.
* `walk`: a walk from a start to a goal on a 10 x 10 grid, "37>12:", in moves up, down, left and right, "UULLLLL". Every
  walk is right that stays on the grid and ends on the goal. The demonstrations contain random moves, so that wrong
  answers are longer than right ones and positive tokens carry less than half of the objective. That is the imbalance
  that BAPO addresses.

The policy is a Qwen2 of 0.3 million parameters over single characters. It is fine-tuned until it samples the right
answer about four times in ten, so that most prompts get both right and wrong answers. A task with many right answers
per prompt is fine-tuned for a fixed number of steps instead.

Fine-tuning takes a minute or two. The folder `policies` has the results for seed 0, made with

    python examples/quickstart/prepare.py --fine_tune --task TASK OUTPUT    (OUTPUT/model is policies/TASK)
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAD, EOS, UNKNOWN = 0, 1, 2
PROMPT_LENGTH = 6  # tokens, which are characters

POLICIES = Path(__file__).with_name("policies")
NUM_HELDOUT, NUM_VALIDATION = 200, 256
TARGET_ACCURACY, MAX_STEPS = 0.4, 400
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
CHECK_EVERY = 10  # fine-tuning steps


@dataclass(frozen=True)
class Task:
    """A task of the policy, and how the policy is fine-tuned on it."""

    make: Callable[[int], list[dict]]
    """Returns all problems in an order that depends only on the seed. Keys: "prompt", "response" (a right one) and
    "entry", the label in the form of a reasoning-gym entry."""

    characters: str
    """The vocabulary: one token per character."""

    max_length: int
    """Maximum number of tokens of prompt, response and end together."""

    num_train: int
    """Number of prompts for reinforcement learning. The others, without the evaluation's, are for fine-tuning."""

    batch_size: int
    """Problems per fine-tuning step."""

    num_steps: int | None = None
    """Number of fine-tuning steps; None: until the policy samples the problems' responses with TARGET_ACCURACY."""


def sums(seed: int) -> list[dict]:
    """Return all distinct two-digit additions among 60,000 reasoning-gym entries."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    dataset = ChainSumDataset(ChainSumConfig(max_terms=2, min_digits=2, max_digits=2, size=60_000, seed=seed))
    by_prompt = {}
    for entry in dataset:
        if "+" in (expression := entry["metadata"]["expression"]):
            by_prompt.setdefault(expression.replace(" ", "") + "=", entry)
    prompts = sorted(by_prompt)
    random.Random(seed).shuffle(prompts)
    entries = [by_prompt[prompt] for prompt in prompts]
    return [{"prompt": p, "response": e["answer"], "entry": e} for p, e in zip(prompts, entries, strict=True)]


def remainders(seed: int) -> list[dict]:
    """Return all divisions of a number below 100 by a number that is not larger."""

    def written(number: int) -> str:
        return f"{number:02}"[::-1]

    problems = []
    for divisor in range(1, 100):
        for dividend in range(divisor, 100):
            left = range(dividend - divisor, -1, -divisor)
            problems.append(
                {
                    "prompt": f"{written(dividend)}-{written(divisor)}=",
                    "response": f"-{written(divisor)}=".join(map(written, left)),
                    "entry": {"answer": written(left[-1]), "metadata": {"is_worked_out": True}},
                }
            )
    random.Random(seed).shuffle(problems)
    return problems


def walks(seed: int, stray: float = 0.35, longest: int = 40) -> list[dict]:
    """Return all pairs of places. A response heads for the goal, except for a share `stray` of random moves."""
    rng, size, moves = random.Random(seed), 10, {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
    places = list(itertools.product(range(size), repeat=2))
    problems = []
    for start, goal in itertools.permutations(places, 2):
        at, taken = start, ""
        while len(taken) < longest and (at != goal or rng.random() < stray):
            ways = {m: (at[0] + row, at[1] + column) for m, (row, column) in moves.items()}
            ways = {move: to for move, to in ways.items() if {*to} <= {*range(size)}}
            if at != goal and rng.random() >= stray:
                ways = {move: to for move, to in ways.items() if math.dist(to, goal) < math.dist(at, goal)}
            move = rng.choice(list(ways))
            at, taken = ways[move], taken + move
        prompt = f"{start[0]}{start[1]}>{goal[0]}{goal[1]}:"
        entry = {"answer": "", "metadata": {"walk": {"start": start, "goal": goal, "size": size}}}
        problems.append({"prompt": prompt, "response": taken, "entry": entry})
    rng.shuffle(problems)
    return problems


TASKS = {
    "chain_sum": Task(sums, characters="0123456789+=", max_length=10, num_train=3200, batch_size=256),
    "remainder": Task(remainders, characters="0123456789-=", max_length=600, num_train=1600, batch_size=128),
    "walk": Task(walks, characters="0123456789>:UDLR", max_length=46, num_train=3200, batch_size=256, num_steps=200),
}


def write_problems(problems: list[dict], task: str, path: Path) -> None:
    """Write prompts as OpenRLHF reads them; the label is the entry that `reward.py` scores against."""
    with open(path, "w") as file:
        for problem in problems:
            row = {"input": problem["prompt"], "label": json.dumps(problem["entry"]), "datasource": task}
            file.write(json.dumps(row) + "\n")


def make_tokenizer(task: Task):
    """Return a tokenizer with one token per character, whose decoding restores the text exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN}
    vocabulary = special | {character: len(special) + i for i, character in enumerate(task.characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(task: Task, seed: int):
    """Return an untrained policy. Its heads have 32 dimensions, which vLLM's CPU attention supports."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=3 + len(task.characters),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max(64, task.max_length),
            initializer_range=0.05,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # relevant tokens are ten positions back
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def encode(problems: list[dict], tokenizer) -> list:
    """Return prompt, response and end of every problem as token ids, [length] each."""
    import torch

    ids = tokenizer([problem["prompt"] + problem["response"] for problem in problems])["input_ids"]
    return [torch.tensor([*tokens, EOS]) for tokens in ids]


def log_probs_of_responses(model, sequences: list) -> Iterator:
    """Yield log-probs of response tokens, [sequences, tokens], 0 where padded, in batches of similar length."""
    import torch
    from torch.nn.functional import cross_entropy

    batches = []
    for tokens in sorted(sequences, key=len):
        if not batches or len(tokens) > 1.5 * len(batches[-1][0]) + 8:
            batches.append([])
        batches[-1].append(tokens)
    for batch in batches:
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)
        logits = model(ids[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        yield -cross_entropy(logits.transpose(1, 2), ids[:, PROMPT_LENGTH:], ignore_index=PAD, reduction="none")


def sampled_accuracy(model, sequences: list) -> float:
    """Return the mean probability of sampling the given responses at temperature 1."""
    import torch

    with torch.no_grad():
        found = [log_probs.sum(-1).exp() for log_probs in log_probs_of_responses(model, sequences)]
    return torch.cat(found).mean().item()


def fine_tune(model, sequences: list, validation: list, task: Task, seed: int) -> None:
    """Fine-tune in place until the task's target is reached; exit if it is not reached in MAX_STEPS steps."""
    import torch

    # One thread: these matrices are too small to share, and a second thread would wait while its core is busy.
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    generator = torch.Generator().manual_seed(seed)
    start = time.monotonic()
    for step in range(1, MAX_STEPS + 1):
        chosen = [sequences[i] for i in torch.randint(len(sequences), (task.batch_size,), generator=generator)]
        num_tokens, loss = sum(len(tokens) - PROMPT_LENGTH for tokens in chosen), 0.0
        optimizer.zero_grad()
        for log_probs in log_probs_of_responses(model, chosen):
            part = -log_probs.sum() / num_tokens
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % CHECK_EVERY == 0:
            progress = f"step {step:3}  loss {loss:.3f}"
            if task.num_steps:
                is_done = step >= task.num_steps
            else:
                accuracy = sampled_accuracy(model, validation)
                progress, is_done = f"{progress}  sampled accuracy {accuracy:.3f}", accuracy >= TARGET_ACCURACY
            print(f"[{time.monotonic() - start:4.0f} s] fine-tuning {progress}", flush=True)
            if is_done:
                return
    sys.exit(f"fine-tuning did not reach an accuracy of {TARGET_ACCURACY} in {MAX_STEPS} steps; try another --seed")


def make_policy(task: Task, seed: int, problems: list[dict], validation: list[dict], output: Path) -> None:
    """Fine-tune a policy on `problems`, and write it with its tokenizer to the folder `output`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, model = make_tokenizer(task), make_model(task, seed)
    fine_tune(model, encode(problems, tokenizer), encode(validation, tokenizer), task, seed)
    tokenizer.save_pretrained(output)
    model.to(torch.bfloat16).save_pretrained(output)


def main() -> None:
    """Make the start, unless it exists. An interrupted run leaves only OUTPUT.part, which the next run replaces.

    Of several runs at once one makes it, and the others wait.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument("--task", choices=TASKS, default="walk", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fine_tune", action="store_true", help="make the policy, instead of copying that of seed 0")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("task", "seed", "fine_tune")}
    settings["source"] = Path(__file__).read_text()
    record = args.output / "settings.json"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lock = open(args.output.with_name(args.output.name + ".lock"), "w")  # noqa: SIM115 - to the end of this process
    with contextlib.suppress(OSError):  # a network disk without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    if record.exists() and json.loads(record.read_text()) == settings:
        print(f"the policy to start from is in {args.output}")
        return

    print(f"making the start for the task {args.task}", flush=True)
    aside = args.output.with_name(args.output.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    task = TASKS[args.task]
    problems = task.make(args.seed)
    heldout, problems = problems[:NUM_HELDOUT], problems[NUM_HELDOUT:]
    write_problems(heldout, args.task, aside / "heldout.jsonl")
    write_problems(problems[NUM_VALIDATION:][: task.num_train], args.task, aside / "train.jsonl")
    if args.seed == 0 and not args.fine_tune:
        shutil.copytree(POLICIES / args.task, aside / "model")
    else:
        validation, others = problems[:NUM_VALIDATION], problems[NUM_VALIDATION + task.num_train :]
        make_policy(task, args.seed, others, validation, aside / "model")
    (aside / "settings.json").write_text(json.dumps(settings))
    shutil.rmtree(args.output, ignore_errors=True)
    aside.rename(args.output)


if __name__ == "__main__":
    main()
