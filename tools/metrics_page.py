"""Writes the tables of docs/metrics.md from openrlhf_bapo/health/metric_guide.py.

.venv/bin/python tools/metrics_page.py [--check]

With --check it writes nothing, and the exit code is 1 if the page has other tables.
"""

import argparse
import re
import sys
from pathlib import Path

from openrlhf_bapo.health.metric_guide import SECTIONS

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
HEAD = "| metric | meaning | healthy | remedy |\n|---|---|---|---|\n"


def table(section: str) -> str:
    """Return the table of a section as Markdown."""
    lines = []
    for guide in SECTIONS[section]:
        names = " ".join([", ".join(f"`{name}`" for name in guide.metrics), guide.note]).strip()
        lines.append(f"| {names} | {guide.what} | {guide.healthy} | {guide.remedy} |\n")
    return HEAD + "".join(lines)


def with_tables(page: str) -> str:
    """Return the page with the tables of today in place of its own."""
    for section in SECTIONS:
        head, rest = page.split(f"\n## {section}\n", 1)
        prose, _, after = re.split(r"((?:^\|[^\n]*\n)+)", rest, maxsplit=1, flags=re.MULTILINE)
        page = f"{head}\n## {section}\n{prose}{table(section)}{after}"
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text()
    if parser.parse_args().check:
        sys.exit(with_tables(page) != page)
    PAGE.write_text(with_tables(page))
