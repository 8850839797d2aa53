"""The README's commands are real: the scripts exist, and every training command passes both sides' checks."""

import re
import shlex

import pipeline

README = (pipeline.REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def test_every_script_that_the_readme_runs_exists():
    scripts = {word for line in COMMANDS for word in line.split() if word.startswith("scripts/")}
    assert {"scripts/train_bapo_quickstart.sh", "scripts/run_tests.sh"} <= scripts
    assert all((pipeline.REPOSITORY / script).exists() for script in scripts)


def test_every_training_command_in_the_readme_passes_openrlhfs_checks_and_ours():
    training = [shlex.split(line) for line in COMMANDS if "openrlhf-bapo train" in line]
    assert training
    for command in training:
        args = pipeline.parse(command[2:])
        assert args.policy_loss == "bapo"


def test_every_other_command_in_the_readme_has_flags_that_exist():
    from openrlhf_bapo.cli import data, evaluate

    parsers = {"evaluate": evaluate.make_parser(), "data": data.make_parser()}
    commands = [shlex.split(line)[1:] for line in COMMANDS if "openrlhf-bapo" in line and " train " not in line]
    assert {name for name, *_ in commands} == set(parsers)
    for name, *flags in commands:
        parsers[name].parse_args(flags)


def test_every_flag_of_ours_is_in_the_readme():
    import argparse

    from openrlhf_bapo.adapter.flags import add_flags

    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    documented = README.replace("`, `_max`, `_step`", "_start _max _step")
    for action in parser._actions:
        flag = action.option_strings[0]
        assert re.sub(r"_(max|step)$", "_start", flag) in documented, flag
