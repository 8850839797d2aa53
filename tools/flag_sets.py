"""Runs random sets of OpenRLHF's flags through its own command and ours, and writes the table tools/flag_sets.md.

    .venv/bin/python tools/flag_sets.py            # all sets that are not in the table
    .venv/bin/python tools/flag_sets.py 3 17       # these, again

A set takes a minute or two on two cores. tests/full/test_flag_sets.py runs five of them.
"""

import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests/support"))

import flag_sets  # noqa: E402

TABLE = REPOSITORY / "tools/flag_sets.md"
HEAD = """# Random sets of OpenRLHF's flags

Each set has two training steps through OpenRLHF's own command, and through ours with `--policy_loss ppo` and `bapo`
(tools/flag_sets.py). The sets are drawn from the choices of OpenRLHF's parser (tests/support/flag_sets.py). `ppo`: how
the saved weights compare with those of OpenRLHF's command, in bf16. `bapo`: whether it trains.

| seed | flags | ppo | bapo |
|---|---|---|---|
"""


def rows() -> dict[int, str]:
    """Read the rows of the table, by seed."""
    table = TABLE.read_text() if TABLE.exists() else ""
    return {int(seed): row for row, seed in re.findall(r"^(\| (\d+) \|.*)$", table, re.MULTILINE)}


def main() -> None:
    """Run the sets whose seeds are given, or those that the table lacks."""
    choices = flag_sets.parsers_choices()
    for seed in map(int, sys.argv[1:]) if sys.argv[1:] else set(range(flag_sets.NUM_SETS)) - rows().keys():
        with tempfile.TemporaryDirectory(prefix="flag-sets-") as directory:
            outcome = flag_sets.compare(Path(directory), seed, flag_sets.draw(seed, choices))
        row = f"| {seed} | `{outcome.flags}` | {outcome.ppo} | {outcome.bapo} |".replace("\n", " ")
        print("ok " if outcome.is_fine else "NOT", row, flush=True)
        known = rows() | {seed: row}  # another run may have added some
        TABLE.write_text(HEAD + "".join(f"{known[seed]}\n" for seed in sorted(known)))


if __name__ == "__main__":
    main()
