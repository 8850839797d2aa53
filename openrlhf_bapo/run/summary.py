"""Says how many of the planned training steps a run has made, and why not all of them."""

from openrlhf_bapo.openrlhf import job_store
from openrlhf_bapo.openrlhf.run_counts import GROUPS, PLANNED, STEPS

_REASONS = {
    "filtered": "dynamic filtering rejected {count} prompt groups (--algo.dynamic_filtering_range {range})",
    "unrewarded": "{count} prompt groups had no reward",
    "stale": "{count} prompt groups became too old (--partial.max_staleness, --partial.max_segments)",
    "left_over": "{count} prompt groups at the end of the data fill no optimizer step",
}
"""By the reason for which a prompt group was not trained on."""


def describe_training(args: dict) -> str:
    """Describe the training of this Ray job, from what its processes have noted; `args` are flat.

    For example "3 of 4 planned training steps (dynamic filtering rejected 5 prompt groups
    (--algo.dynamic_filtering_range 0 1))".
    """
    steps, groups, planned = job_store.get(STEPS), job_store.get(GROUPS) or {}, job_store.get(PLANNED)
    made = steps["before"] + steps["made"]
    limits = " ".join(map(str, args["algo.dynamic_filtering_range"]))
    reasons = [
        words.format(count=groups[name], range=limits) for name, words in _REASONS.items() if groups.get(name, 0)
    ]
    if alone := steps["critic_alone"]:
        reasons.append(f"{alone} of them trained the critic alone (--critic.freezing_steps)")
    if skipped := steps["updates_skipped"]:
        total = skipped + steps["updates"]
        reasons.append(f"{skipped} of {total} optimizer steps were skipped: their loss or gradient was not finite")
    if reasons and steps["before"]:
        reasons[0] = f"since step {steps['before']}, {reasons[0]}"
    return f"{made} of {planned} planned training steps" + (f" ({'; '.join(reasons)})" if reasons else "")
