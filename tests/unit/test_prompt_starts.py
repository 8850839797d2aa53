"""Prompts without the BOS token that the model was trained with, or with two, and prompts with two chat templates."""

import pipeline
import pytest
from test_partial_samples import make_generator
from tokenizers import processors
from transformers import AutoTokenizer

from openrlhf_bapo import evaluation
from openrlhf_bapo.openrlhf.prompt_starts import find_wrong_starts

WITHOUT = "do not begin with <bos>, which the tokenizer puts before other texts; an input template can add it"


@pytest.fixture
def directory(tmp_path):
    """A tiny model whose tokenizer begins every text with <bos>, as Llama's and Gemma's do."""
    tokenizer = AutoTokenizer.from_pretrained(pipeline.make_model(tmp_path) / "model")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    start = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=start)
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def test_prompts_without_the_bos_token_and_with_two_are_counted(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    assert find_wrong_starts(tokenizer, ["<bos>1+2=", "1+2=", "1+3="]) == f"2 of 3 prompts {WITHOUT}"
    assert find_wrong_starts(tokenizer, ["<bos>1+2=", "<bos><bos>1+2="]) == "1 of 2 prompts begin with <bos> twice"
    assert find_wrong_starts(tokenizer, ["<bos>1+2=", "<bos>1+<bos>="]) is None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")  # as Qwen's
    assert find_wrong_starts(tokenizer, ["1+2="]) is None


def test_an_evaluation_warns_of_prompts_without_the_bos_token(directory, capsys):
    problems = [evaluation.Problem("file:1", "sums", {"input": "1+2=", "label": "3"})]
    for template, is_said in ((None, True), ("<bos>{}", False)):
        evaluation.make_prompts(problems, str(directory / "model"), "input", "label", input_template=template)
        assert (f"openrlhf-bapo: warning: --data: 1 of 1 prompts {WITHOUT}\n" in capsys.readouterr().err) == is_said


def test_a_training_warns_of_prompts_without_the_bos_token(directory, capsys):
    make_generator(directory)
    assert f"warning: --data.prompt_dataset: 20 of 20 prompts {WITHOUT}" in capsys.readouterr().out


def test_an_evaluation_warns_of_a_chat_template_on_top_of_another(tmp_path, capsys):
    model = pipeline.make_model(tmp_path) / "model"
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}=")
    made = "<\uff5cUser\uff5c>1+2="
    problems = [
        evaluation.Problem(f"file:{i}", "", {"input": text, "label": "3"}) for i, text in enumerate(["1", made])
    ]
    said = "--data: 1 prompts have a chat template already, and get another one (file:1 has <\uff5cUser\uff5c>)"
    for apply in (None, False):
        evaluation.make_prompts(problems, str(model), "input", "label", apply_chat_template=apply)
        assert (said in capsys.readouterr().err) == (apply is None)
