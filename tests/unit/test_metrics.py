"""docs/metrics.md describes every metric that the code logs, and no others."""

import re

import pipeline
import torch

from openrlhf_bapo import ClipConfig, find_clip_bounds
from openrlhf_bapo.offpolicy.offpolicy_metrics import offpolicy_metrics, tally_offpolicy
from openrlhf_bapo.offpolicy.partial_rollouts import PartialConfig, PartialPool
from openrlhf_bapo.offpolicy.replay_pool import ReplayConfig, ReplayPool
from openrlhf_bapo.openrlhf.reward_calls import KINDS
from openrlhf_bapo.rules.bounds_metrics import bounds_metrics
from openrlhf_bapo.rules.clip_rules import FixedBounds, Tokens, UpdateBounds
from openrlhf_bapo.rules.entropy_rule import EntropyRule
from openrlhf_bapo.rules.other_rules import BalancedWeights

GROUPS = "bapo|entropy|offpolicy|partial|replay|reward_fault|rollout|timing"
NAME = rf"(?:{GROUPS})/[a-z_]+"


def logged() -> set[str]:
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.long)
    used, found = (find_clip_bounds(one, one, one, ClipConfig()) for _ in range(2))
    found = {*bounds_metrics([UpdateBounds(used, found)])}
    rule = BalancedWeights()
    rule.tally(Tokens(one, one, one, one))
    found |= {*bounds_metrics([rule.close_update()])}
    found |= {*offpolicy_metrics(tally_offpolicy(one, one, one, zero, zero, 0.8, 1.2))}
    rule = EntropyRule()
    rule.tally(FixedBounds(0.8, 1.2), Tokens(one, one, one, one))
    rule.close_update()
    found |= {*rule.take_metrics()}
    found |= {*ReplayPool(ReplayConfig()).metrics(), *PartialPool(PartialConfig()).metrics()}
    found |= {"partial/segments_mean", "partial/segments_max"}  # where a response was taken
    found |= {f"reward_fault/{kind}" for kind in KINDS}
    found |= {f"offpolicy/{name}" for name in ("nonfinite_tokens", "updates_skipped")}
    found |= {f"rollout/response_length_{sign}_mean" for sign in ("positive", "negative")}
    for file in (pipeline.REPOSITORY / "openrlhf_bapo" / "openrlhf").glob("*.py"):
        found |= set(re.findall(rf'"({NAME})"', file.read_text()))
    return {re.sub(r"/staleness_\d.*", "", name) for name in found}


def test_the_metrics_page_describes_every_metric_that_the_code_logs_and_no_others():
    page = (pipeline.REPOSITORY / "docs" / "metrics.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(rf"`({NAME})`", row[0])]
    assert len(named) == len(set(named))
    assert all(len(row) == 4 and all(cell.strip(" |") for cell in row) for row in rows)
    theirs = {"timing/step_total", "timing/ppo_train", "rollout/reward_mean"}  # OpenRLHF's own
    assert set(named) == logged() - theirs - {"offpolicy/token_frac"}
    assert set(re.findall(rf"`({NAME})`", page)) <= {*named, *theirs, "offpolicy/token_frac"}
