"""README and docs say what is true: scripts, links and flags exist, commands pass both sides' checks, blocks run."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pipeline
import pytest

from openrlhf_bapo.flags.train_flags import add_flags
from openrlhf_bapo.run.plan import GIB, Machine, make_plan, read_shape

DOCS = pipeline.REPOSITORY / "docs"
README = (pipeline.REPOSITORY / "README.md").read_text()
PAGES = [pipeline.REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
TRL_BLOCK, LOOP_BLOCK = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def our_flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def documented_flags() -> set[str]:
    """Return the flags in the first column of the flags page; `_max` after a flag replaces its last word."""
    found = set()
    for line in (DOCS / "flags.md").read_text().splitlines():
        names = re.findall(r"`(--[\w.-]+|_\w+)[^`]*`", line.split(" | ")[0]) if line.startswith("| `") else []
        for name in names:
            found.add(name if name.startswith("--") else names[0].rpartition("_")[0] + name)
    return found


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_script_and_file_that_the_pages_name_exists():
    text = TEXT + (pipeline.REPOSITORY / "CONTRIBUTING.md").read_text()
    files = set(
        re.findall(r"\b(?:benchmarks|examples|scripts|tests|tools)/[\w/.-]+\.(?:jsonl|md|py|sh|txt|yaml)\b", text)
    )
    assert {"scripts/train_bapo_quickstart.sh", "scripts/run_tests.sh", "examples/verl/train.sh"} <= files
    files -= {"examples/data_preprocess/gsm8k.py"}  # of verl
    assert not [file for file in files if not (pipeline.REPOSITORY / file).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_of_a_page_is_there_and_the_readme_leads_to_it(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    for file, _, anchor in (link.partition("#") for link in links):
        target = page.parent / file if file else page
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), anchor
    if page.parent == DOCS:
        assert f"- {page.name}\n" in (pipeline.REPOSITORY / "mkdocs.yml").read_text()
        assert page.name == "index.md" or f"](docs/{page.name})" in PAGES[0].read_text()


def test_every_training_command_of_the_pages_passes_openrlhfs_checks_and_ours():
    training = [shlex.split(line) for line in COMMANDS if "openrlhf-bapo train" in line]
    assert training
    for command in training:
        args = pipeline.parse(command[2:])
        assert args.policy_loss == "bapo"
        assert 0 < args.ckpt.save_steps < float("inf")
        plan = make_plan(args, read_shape(args.actor.model_name_or_path), Machine())
        largest = max(phase.total for phase in plan.phases["every GPU"]) / GIB
        assert not plan.problems and largest <= 80 - 5
        assert f"at most {largest:.1f} GiB" in README


def test_the_recipes_page_has_the_planned_memory_of_the_32b_recipe_on_two_nodes():
    command = pipeline.run_script("train_bapo_qwen32b.sh", DRY_RUN="command", NUM_NODES=2).stdout
    args = pipeline.parse(shlex.split(command)[2:])
    phases = make_plan(args, read_shape(args.actor.model_name_or_path), Machine()).phases["every GPU"]
    gib = {phase.name: phase.total / GIB for phase in phases}
    rollout, training = gib.pop("generation"), max(size for name, size in gib.items() if name != "weight sync")
    assert f"with `NUM_NODES=2` | | 2 nodes of 8 GPUs | {rollout:.0f} / {training:.0f} |" in TEXT


def test_every_other_command_of_the_pages_has_flags_that_exist():
    from openrlhf_bapo.cli import data, evaluate

    parsers = {"evaluate": evaluate.make_parser(), "data": data.make_parser()}
    ours = [line for line in COMMANDS if line.startswith(".venv/bin/openrlhf-bapo ")]
    commands = [shlex.split(line)[1:] for line in ours if " train " not in line]
    assert {name for name, *_ in commands} == set(parsers)
    for name, *flags in commands:
        parsers[name].parse_args(flags)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_ray_command_of_the_pages_has_flags_that_exist():
    from ray.scripts.scripts import cli

    commands = [shlex.split(line, comments=True)[1:] for line in COMMANDS if line.startswith(".venv/bin/ray ")]
    assert {name for name, *_ in commands} == {"start", "status", "stop"}
    for name, *flags in commands:
        known = {option for parameter in cli.commands[name].params for option in parameter.opts}
        assert {flag for flag in flags if flag.startswith("--")} <= known


def test_the_pages_name_all_flags_of_weights_and_biases_and_no_others():
    (command,) = [shlex.split(line) for line in COMMANDS if "openrlhf-bapo train" in line]
    logger = pipeline.parse(command[2:]).logger
    assert set(re.findall(r"--logger\.wandb\.(\w+)", TEXT)) == set(vars(logger.wandb))


def test_the_readmes_script_for_trl_trains_on_its_prompts_and_writes_a_checkpoint(tmp_path):
    model = pipeline.make_model(tmp_path) / "model"
    (prompt,) = re.findall(r'`(\{"input".*\})`', README)
    prompts = [json.dumps({"input": f"{n}+1=", "label": str(n + 1)}) for n in range(15)]
    assert json.loads(prompt).keys() == json.loads(prompts[0]).keys()
    (tmp_path / "PROMPTS.jsonl").write_text("\n".join([prompt, *prompts]))
    small = "use_cpu=True, bf16=False, max_steps=2, max_completion_length=4, report_to='none', "
    script = TRL_BLOCK.replace('"Qwen/Qwen2.5-1.5B"', repr(str(model)))
    script = script.replace("num_iterations=2, save_steps=20", f"num_iterations=2, save_steps=2, {small}")
    assert script.count(small) == script.count(str(model)) == 1
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors").exists()


def test_the_readmes_update_of_an_own_loop_prints_the_bounds_that_it_clips_to(capsys):
    names = {}
    exec(LOOP_BLOCK, names)
    lower, upper = map(
        float, re.match(r"clip to \[(.*), (.*)\], positive share 0\.\d{3}$", capsys.readouterr().out).groups()
    )
    assert 0.6 <= lower <= 0.9 and 1.2 <= upper <= 3
    assert names["logits"].grad.abs().sum() > 0


def test_the_readme_is_short_and_its_pictures_are_small():
    assert len(README.splitlines()) <= 120
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert pictures and all((pipeline.REPOSITORY / file).stat().st_size < 150_000 for file in pictures)


def test_every_measured_number_of_the_readme_stands_in_the_study():
    advice = README.partition("## Which method when")[2].partition("## Recipes")[0]
    numbers = set(re.findall(r"\d\.\d{3}", advice))
    assert numbers and numbers <= set(re.findall(r"\d\.\d{3}", (DOCS / "study.md").read_text()))


def test_the_tables_of_versions_have_the_pins_of_the_package_and_of_the_set_up():
    pins = "\n".join((pipeline.REPOSITORY / name).read_text() for name in ("setup.cfg", "scripts/requirements-cpu.txt"))
    page = (DOCS / "frameworks.md").read_text()
    for title in ("OpenRLHF", "vLLM", "DeepSpeed", "Ray", "transformers", "TRL", "verl"):
        pin = rf"^ *{title.lower()}(?:-cpu)?(?:\[[\w,]+\])?==([\d.]+)$"
        versions = set(re.findall(pin, pins, re.MULTILINE))
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {title} | ")]
        assert len(versions) == 1 and versions <= set(re.findall(r"[\d.]+\d", row))
        assert versions.pop() in README


def test_the_flags_page_has_every_flag_of_ours_and_none_that_is_gone():
    assert documented_flags() == our_flags()


def test_every_flag_of_ours_that_a_page_names_exists():
    groups = {flag.partition(".")[0] for flag in our_flags()} - {"--policy_loss", "--ckpt", "--eval"}
    named = set(re.findall(r"--(?:no-)?(?:[a-z]\w+)\.\w+", TEXT))
    assert {flag for flag in named if flag.partition(".")[0] in groups} <= our_flags()
