"""README and docs say what is true: scripts, links and flags exist, and every command passes both sides' checks."""

import argparse
import re
import shlex

import pipeline
import pytest

from openrlhf_bapo.command.flags import add_flags

DOCS = pipeline.REPOSITORY / "docs"
PAGES = [pipeline.REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def our_flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def documented_flags() -> set[str]:
    """Those in the first column of the flags page; `_max` after a flag stands for it with another last word."""
    found = set()
    for line in (DOCS / "flags.md").read_text().splitlines():
        names = re.findall(r"`(--[\w.-]+|_\w+)[^`]*`", line.split(" | ")[0]) if line.startswith("| `") else []
        for name in names:
            found.add(name if name.startswith("--") else names[0].rpartition("_")[0] + name)
    return found


def test_every_script_that_the_pages_run_exists():
    scripts = {word for line in COMMANDS for word in line.split() if word.startswith("scripts/")}
    assert {"scripts/train_bapo_quickstart.sh", "scripts/run_tests.sh"} <= scripts
    assert all((pipeline.REPOSITORY / script).exists() for script in scripts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_of_a_page_is_there_and_the_readme_leads_to_it(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert all((page.parent / link.partition("#")[0]).exists() for link in links), links
    if page.parent == DOCS:
        assert f"- {page.name}\n" in (pipeline.REPOSITORY / "mkdocs.yml").read_text()
        assert page.name == "index.md" or f"](docs/{page.name})" in PAGES[0].read_text()


def test_every_training_command_of_the_pages_passes_openrlhfs_checks_and_ours():
    training = [shlex.split(line) for line in COMMANDS if "openrlhf-bapo train" in line]
    assert training
    for command in training:
        args = pipeline.parse(command[2:])
        assert args.policy_loss == "bapo"


def test_every_other_command_of_the_pages_has_flags_that_exist():
    from openrlhf_bapo.cli import data, evaluate

    parsers = {"evaluate": evaluate.make_parser(), "data": data.make_parser()}
    commands = [shlex.split(line)[1:] for line in COMMANDS if "openrlhf-bapo" in line and " train " not in line]
    assert {name for name, *_ in commands} == set(parsers)
    for name, *flags in commands:
        parsers[name].parse_args(flags)


def test_the_flags_page_has_every_flag_of_ours_and_none_that_is_gone():
    assert documented_flags() == our_flags()


def test_every_flag_of_ours_that_a_page_names_exists():
    groups = {flag.partition(".")[0] for flag in our_flags()} - {"--policy_loss", "--ckpt", "--eval"}
    named = set(re.findall(r"--(?:no-)?(?:[a-z]\w+)\.\w+", TEXT))
    assert {flag for flag in named if flag.partition(".")[0] in groups} <= our_flags()
