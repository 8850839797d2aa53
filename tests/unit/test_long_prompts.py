"""Prompts that are too long for the engines."""

from argparse import Namespace

import pipeline
import pytest
from transformers import AutoTokenizer

from openrlhf_bapo.cli.progress import describe
from openrlhf_bapo.openrlhf.long_prompts import find_cut_prompts


@pytest.mark.parametrize(("max_new_tokens", "limit"), [(8, 16), (None, 23)])
def test_prompts_that_leave_no_room_for_the_response_are_found_and_counted(max_new_tokens, limit, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(pipeline.make_model(tmp_path) / "model")
    fits, too_long = "1" * limit, "1" * (limit + 1)  # a token is a character
    args = Namespace(data=Namespace(max_len=24), rollout=Namespace(max_new_tokens=max_new_tokens))
    data = Namespace(dataset=Namespace(prompts=[fits, too_long, "1", too_long]))
    assert find_cut_prompts(args, tokenizer, "--data.prompt_dataset", data) == {too_long}
    said = capsys.readouterr().out
    assert f"--data.prompt_dataset: 2 of 4 prompts have more than {limit} tokens (the longest {limit + 1})" in said
    assert describe(f"\x1b[36m(PPOTrainer pid=7)\x1b[0m {said}") == said.rstrip("\n")
    data.dataset.prompts = [fits]
    assert find_cut_prompts(args, tokenizer, "--eval.dataset", data) == set()
    assert capsys.readouterr().out == ""
