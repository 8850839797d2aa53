"""The task of verl's and Molt's examples for a laptop: odd digits. A random policy learns it in a few steps.

    python examples/digits.py FOLDER

makes FOLDER with a random policy of 0.3 million parameters, and prompts for OpenRLHF and Molt (train.jsonl) and for
verl (train.parquet, test.parquet).
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("quickstart")))

MAX_RESPONSE = 8  # tokens, which are characters
NUM_PROMPTS = 512


def reward(response: str) -> float:
    """Return the number of odd digits as a fraction of the longest response."""
    return sum(character in "13579" for character in response) / MAX_RESPONSE


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return the reward; verl's `reward.custom_reward_function`."""
    return reward(solution_str)


def main(folder: Path) -> None:
    """Make the folder, unless it has been made."""
    from datasets import Dataset
    from prepare import TASKS, make_model, make_tokenizer, write_problems

    if (folder / "test.parquet").exists():
        return
    task = TASKS["chain_sum"]
    tokenizer = make_tokenizer(task)
    tokenizer.add_tokens(["\n"])  # verl asks for it, and for a template
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder / "model")
    make_model(task, seed=0).save_pretrained(folder / "model")
    write_problems(task.make(0)[:NUM_PROMPTS], "chain_sum", folder / "train.jsonl")
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": json.loads(line)["input"]}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for line in (folder / "train.jsonl").read_text().splitlines()
    ]
    for part in ("train", "test"):
        Dataset.from_list(rows).to_parquet(folder / f"{part}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
