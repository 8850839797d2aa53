"""Makes the quickstart's start: a tiny policy that can nearly add, and prompts to train and evaluate it on.

The tasks are sums of two two-digit numbers from reasoning-gym's `chain_sum`; a prompt is the entry's expression without
its sentence and spaces, "48+95=", to keep sequences short. The policy is a Qwen2 of 0.3 million parameters over single
characters, fine-tuned until it samples the right answer about four times in ten: a start from which reinforcement
learning has right and wrong answers to the same prompt to learn from.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

CHARACTERS = "0123456789+="
PAD, EOS, UNKNOWN = 0, 1, 2
PROMPT_LENGTH, ANSWER_LENGTH = 6, 4  # tokens; an answer has up to three digits and the end of the sequence

NUM_HELDOUT, NUM_VALIDATION, NUM_TRAIN = 200, 256, 3200  # the other prompts, about 4,400, are fine-tuned on
TARGET_ACCURACY, MAX_STEPS = 0.4, 400
BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS = 256, 3e-3, 20
CHECK_EVERY = 10  # fine-tuning steps


def sums(seed: int) -> list[dict]:
    """All distinct two-digit additions among many reasoning-gym entries, in an order that depends on the seed alone."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    dataset = ChainSumDataset(ChainSumConfig(max_terms=2, min_digits=2, max_digits=2, size=60_000, seed=seed))
    by_prompt = {}
    for entry in dataset:
        if "+" in (expression := entry["metadata"]["expression"]):
            by_prompt.setdefault(expression.replace(" ", "") + "=", entry)
    prompts = sorted(by_prompt)
    random.Random(seed).shuffle(prompts)
    return [{"prompt": prompt, "entry": by_prompt[prompt]} for prompt in prompts]


def write_tasks(tasks: list[dict], path: Path) -> None:
    """Prompts as OpenRLHF reads them; the label is the reasoning-gym entry that `reward.py` scores against."""
    with open(path, "w") as file:
        for task in tasks:
            row = {"input": task["prompt"], "label": json.dumps(task["entry"]), "datasource": "chain_sum"}
            file.write(json.dumps(row) + "\n")


def make_tokenizer():
    """One token a character; text comes back from tokens as it was."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN}
    vocabulary = special | {character: len(special) + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(seed: int):
    """An untrained policy; heads of 32 dimensions, which vLLM's CPU attention supports."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=3 + len(CHARACTERS),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            initializer_range=0.05,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sequences of ten tokens
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def encode(tasks: list[dict], tokenizer):
    """Prompt, answer, end and padding as token ids, [num_tasks, PROMPT_LENGTH + ANSWER_LENGTH]."""
    import torch

    ids = torch.full((len(tasks), PROMPT_LENGTH + ANSWER_LENGTH), PAD)
    for row, task in zip(ids, tasks, strict=True):
        tokens = [*tokenizer(task["prompt"] + task["entry"]["answer"])["input_ids"], EOS]
        row[: len(tokens)] = torch.tensor(tokens)
    return ids


def sampled_accuracy(model, ids) -> float:
    """How often two answers sampled at temperature 1 to each of `ids`' prompts are right, end included."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = ids.repeat(2, 1)
    sampled = ids[:, :PROMPT_LENGTH]
    ended = torch.zeros(len(ids), dtype=torch.bool)
    with torch.no_grad():
        for _ in range(ANSWER_LENGTH):
            probabilities = model(sampled).logits[:, -1].softmax(-1)
            token = torch.multinomial(probabilities, 1, generator=generator)[:, 0].masked_fill(ended, PAD)
            ended |= token == EOS
            sampled = torch.cat([sampled, token[:, None]], 1)
    return (sampled == ids).all(1).float().mean().item()


def fine_tune(model, ids, validation, seed: int) -> None:
    """Train in place on prompts with their answers until the target accuracy; exits if it is never reached."""
    import torch
    from torch.nn.functional import cross_entropy

    # One thread: these matrices are too small to share, and a second thread waits for any other program's core.
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    generator = torch.Generator().manual_seed(seed)
    start = time.monotonic()
    for step in range(1, MAX_STEPS + 1):
        batch = ids[torch.randint(len(ids), (BATCH_SIZE,), generator=generator)]
        logits = model(batch[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        answer = batch[:, PROMPT_LENGTH:]
        loss = cross_entropy(logits.flatten(0, 1), answer.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, validation)
            progress = f"step {step:3}  loss {loss.item():.3f}  sampled accuracy {accuracy:.3f}"
            print(f"[{time.monotonic() - start:4.0f} s] fine-tuning {progress}", flush=True)
            if accuracy >= TARGET_ACCURACY:
                return
    sys.exit(f"fine-tuning did not reach an accuracy of {TARGET_ACCURACY} in {MAX_STEPS} steps; try another --seed")


def main() -> None:
    """Make the start, unless it is there; an interrupted run leaves nothing that looks complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = {"seed": args.seed, "source": Path(__file__).read_text()}
    record = args.output / "settings.json"
    if record.exists() and json.loads(record.read_text()) == settings:
        print(f"the policy to start from is in {args.output}")
        return

    print("making a policy that can nearly add", flush=True)
    aside = args.output.with_name(args.output.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tasks = sums(args.seed)
    heldout, tasks = tasks[:NUM_HELDOUT], tasks[NUM_HELDOUT:]
    validation, tasks = tasks[:NUM_VALIDATION], tasks[NUM_VALIDATION:]
    write_tasks(heldout, aside / "heldout.jsonl")
    write_tasks(tasks[:NUM_TRAIN], aside / "train.jsonl")

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which transformers loads, would warn that it found none
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, model = make_tokenizer(), make_model(args.seed)
    fine_tune(model, encode(tasks[NUM_TRAIN:], tokenizer), encode(validation, tokenizer), args.seed)
    tokenizer.save_pretrained(aside / "model")
    model.to(torch.bfloat16).save_pretrained(aside / "model")
    (aside / "settings.json").write_text(json.dumps(settings))
    shutil.rmtree(args.output, ignore_errors=True)
    aside.rename(args.output)


if __name__ == "__main__":
    main()
