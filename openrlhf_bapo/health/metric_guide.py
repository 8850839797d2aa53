"""The meaning of every metric that we log, its healthy values, and the remedy for other values.

docs/metrics.md has these tables (tools/metrics_page.py writes them), and `openrlhf-bapo doctor` prints the remedies.
"""

from typing import NamedTuple


class Guide(NamedTuple):
    """A row of the tables: one metric, or several that are read together. All texts are Markdown."""

    metrics: tuple[str, ...]
    what: str
    healthy: str
    remedy: str
    """The remedy for values that are not healthy."""
    note: str = ""
    """Text after the metrics' names in the first column."""


SECTIONS: dict[str, tuple[Guide, ...]] = {
    "Bounds and shares": (
        Guide(
            ("bapo/clip_low", "bapo/clip_high"),
            "the bounds in use",
            "0.75 to 0.86 and 2.1 to 2.8 with target 0.5; `paper`: 0.64 to 0.71 and 1.4 to 1.9",
            "always at the start of the search: raise the target; always in the far corner: lower it, widen the "
            "ranges, or use `gradient`",
        ),
        Guide(
            ("bapo/positive_share",),
            "positive share at the bounds, by `--bapo.contribution`",
            "0.45 to 0.51 with target 0.5",
            "always below the target: as `bapo/clip_low`",
        ),
        Guide(
            ("bapo/initial_share",),
            "the share at the start of the search",
            "level",
            "falling: see the response lengths and `offpolicy/ess`",
        ),
        Guide(
            ("bapo/target_reached",),
            "fraction of updates whose share meets the target",
            "any, if the share is near the target",
            "always 0: as `bapo/clip_low`",
        ),
        Guide(
            ("bapo/surrogate_share", "bapo/gradient_share"),
            "the share by each `--bapo.contribution`",
            "close to each other",
            "far apart: many tokens are outside the bounds, see the clip fractions",
        ),
        Guide(
            ("bapo/positive_token_frac",),
            "tokens with $A > 0$ among those with $A \\ne 0$ (the paper's section 3, Figure 4)",
            "moves with the reward",
            "near 0 or 1: prompts too hard or too easy; dynamic filtering",
        ),
        Guide(
            ("bapo/clip_frac_positive",),
            "tokens with $A > 0$ above the upper bound",
            "below 0.04 with target 0.5; `paper`: 0.02 to 0.09; PPO: 0.03 to 0.09",
            "above 0.1: a lower learning rate or fewer updates per rollout",
        ),
        Guide(
            ("bapo/clip_frac_negative",),
            "tokens with $A < 0$ below the lower bound",
            "0.06 to 0.2",
            "above 0.25: a lower learning rate or fewer updates per rollout",
        ),
        Guide(
            ("bapo/found_low", "bapo/found_high", "bapo/found_share"),
            "with smoothing: bounds and share found on the update alone",
            "around the bounds in use",
            "always on one side: a shorter half-life",
        ),
        Guide(
            ("bapo/found_distance",),
            "distance of the bounds in use from these, lower plus upper",
            "level",
            "growing: a shorter half-life",
        ),
        Guide(
            ("bapo/negative_weight",),
            "`balanced`: $s$, the factor of the weights of negative tokens",
            "1 or below",
            "near 0: a larger batch, a half-life, or a lower target",
        ),
        Guide(
            ("timing/bapo_ratio_forward",),
            "seconds per training step of the forward for the ratios (OpenRLHF, Molt)",
            "constant",
            "too long: `--bapo.smoothing`, `--m2.half_life` and `--balanced.half_life` need none",
        ),
        Guide(
            ("timing/bapo_search",),
            "the same of the search, with the wait for other ranks",
            "0.01 of `timing/ppo_train` or less",
            "growing with the ranks: one is slow",
        ),
    ),
    "Entropy": (
        Guide(
            ("entropy/predicted_change",),
            "sum of the four parts of tokens trained on: compare its trend, not its size, with the measured entropy",
            "-0.08 to -0.01; near 0 keeps entropy",
            "below 0 while entropy collapses: see which part",
        ),
        Guide(
            ("entropy/positive_high_trained", "entropy/negative_low_trained"),
            "parts that lower entropy",
            "-0.17 to -0.09",
            "the second alone grows: a higher `--bapo.ratio_lower_start`",
        ),
        Guide(
            ("entropy/positive_low_trained", "entropy/negative_high_trained"),
            "parts that raise entropy",
            "0.06 to 0.13",
            "the first is small: see the next row",
        ),
        Guide(
            ("entropy/positive_low_left_out", "entropy/negative_high_left_out"),
            "the rise of entropy that the clip prevents",
            "0 to 0.007",
            "the first is large: a higher `--bapo.ratio_upper_max`",
        ),
        Guide(
            ("entropy/positive_high_left_out", "entropy/negative_low_left_out"),
            "the fall of entropy that the clip prevents",
            "-0.08 to 0",
            "the second is 0 while entropy collapses: a higher `--bapo.ratio_lower_start`",
        ),
    ),
    "Responses": (
        Guide(
            ("rollout/response_length_positive_mean", "rollout/response_length_negative_mean"),
            "tokens per response by the advantage's sign (the paper's section 3, Figure 6)",
            "9 to 12 and 12 to 19, falling",
            "the negative length grows and the share falls: a length penalty, or a token budget",
        ),
        Guide(
            ("rollout/equal_reward_groups",),
            "fresh groups whose rewards are all equal",
            "some",
            "most groups: other prompts, more samples per prompt, or dynamic filtering",
        ),
        Guide(
            ("rollout/groups_left_over",),
            "groups at the end of the data that fill no optimizer step",
            "once per pass over the prompts",
            "batch sizes that divide without a remainder",
        ),
        Guide(
            ("rollout/prompts_cut",),
            "prompts that lost their first tokens to `--data.max_len`",
            "0",
            "a larger `--data.max_len`, or data without these prompts",
        ),
        Guide(
            ("rollout/samples_waiting",),
            "samples made for later training steps",
            "falling by a training batch per step",
            "it stays high: a smaller `--rollout.vllm_generate_batch_size`",
            note="(async training)",
        ),
    ),
    "Off-policy data": (
        Guide(
            ("offpolicy/ess",),
            "effective sample size of the ratios, a fraction",
            "0.9 to 0.98; 1 on-policy",
            "below 0.85: a lower learning rate, fewer updates per rollout, a shorter queue, a smaller "
            "`--replay.max_staleness`",
        ),
        Guide(
            ("offpolicy/ratio_mean",),
            "mean of the ratios",
            "near 1",
            "far from 1: the log-probs are not the behavior policy's; see `offpolicy/engine_mismatch`",
        ),
        Guide(
            ("offpolicy/ratio_max",),
            "largest ratio",
            "2 to 6; 1 on-policy",
            "above 20: `--actor.dual_clip 3` limits the tokens with $A < 0$",
        ),
        Guide(
            ("offpolicy/clip_frac_positive", "offpolicy/clip_frac_negative"),
            "as `bapo/clip_frac_*`",
            "the same",
            "the same",
        ),
        Guide(
            ("offpolicy/staleness_mean", "offpolicy/staleness_max"),
            "staleness of tokens in training, in versions",
            "up to the queue's length, lag or `--replay.max_staleness`",
            "more: a shorter queue, more engines",
        ),
        Guide(
            ("offpolicy/optimizer_steps_mean", "offpolicy/optimizer_steps_max"),
            "optimizer steps since the weights that generated a token",
            "below updates per rollout times (staleness + 1)",
            "more: a shorter queue, more engines, or fewer updates per rollout",
        ),
        Guide(
            ("offpolicy/optimizer_steps_taken",),
            "optimizer steps per training step, without skipped ones",
            "updates per rollout",
            "fewer: see `offpolicy/updates_skipped`",
        ),
        Guide(
            ("offpolicy/nonfinite_tokens",),
            "tokens left out because their log-prob, ratio or advantage is not finite; logged if not 0",
            "0",
            "check whether rewards or engines return NaN",
        ),
        Guide(
            ("offpolicy/updates_skipped",),
            "optimizer steps skipped because loss or gradient was not finite; logged if not 0",
            "0",
            "a lower learning rate; `--bapo.max_skipped_updates` ends the run",
        ),
        Guide(
            ("offpolicy/engine_mismatch",),
            "mean absolute difference of the engine's and actor's log-probs at staleness 0",
            "constant: 0.001 to 0.009 in bf16, 2e-7 in fp32",
            "growing: engine and actor differ by more than rounding; give both the same precision, or "
            "`--offpolicy.ratio_base rollout`",
        ),
        Guide(
            ("offpolicy/weight_negative",),
            "mean tapered weight of tokens with $A < 0$",
            "1 on fresh data; late by 8: 0.16 to 0.79, by token 0.78 to 0.97",
            "below 0.1: stale responses hardly teach what to avoid; less staleness, or "
            "`--offpolicy.weight_level token`",
        ),
        Guide(
            ("offpolicy/mixed_versions",),
            "fraction of fresh responses with tokens of several versions",
            "the fraction cut by the budget",
            "near 1: a larger `--partial.token_budget`",
        ),
    ),
    "Sample replay": (
        Guide(
            ("replay/size", "replay/bytes"),
            "groups in the pool, and their bytes",
            "level at `--replay.capacity` or below",
            "bytes near the host's memory: a smaller capacity",
        ),
        Guide(
            ("replay/reuse_mean",),
            "mean number of replays of the pool's groups",
            "below `--replay.max_reuse`; 0 with its default of 1",
            "near it with few `replay/groups_sampled`: a higher `--replay.max_reuse`, or more fresh samples",
        ),
        Guide(
            ("replay/groups_added", "replay/groups_sampled", "replay/groups_skipped"),
            "groups kept, drawn for replay, and not kept because all their rewards are equal",
            "sampled / (added + skipped) is at most `--replay.ratio`",
            "few sampled: a larger `--replay.capacity` or `--replay.max_staleness`; most skipped: other prompts",
        ),
        Guide(
            ("replay/groups_expired", "replay/groups_exhausted", "replay/groups_evicted"),
            "groups dropped: too stale, replayed `--replay.max_reuse` times, no room",
            "some",
            "expired before they are sampled: a larger `--replay.max_staleness`, a smaller capacity",
        ),
        Guide(
            ("replay/samples_dropped",),
            "as `rollout/groups_left_over`, in samples",
            "the same",
            "batch sizes that divide without a remainder",
        ),
        Guide(
            ("replay/logs_dropped",),
            "names left out because the reward logs them for only some samples",
            "0",
            "log them for all samples",
        ),
    ),
    "Partial rollouts": (
        Guide(
            ("partial/in_flight", "partial/waiting", "partial/started", "partial/taken"),
            "groups: unfinished, complete but waiting, started, and handed over",
            "level; as many started as taken",
            "growing: a larger `--partial.token_budget`",
        ),
        Guide(
            ("partial/resumed", "partial/finished"),
            "responses resumed, and responses ended by `--partial.on_stale finish`",
            "some; few",
            "many finished: a larger budget",
        ),
        Guide(
            ("partial/segments_mean", "partial/segments_max"),
            "rollouts per response handed over",
            "1 to 2",
            "more: a larger `--partial.token_budget`",
        ),
        Guide(
            (
                "partial/dropped",
                "partial/dropped_stale",
                "partial/dropped_filtered",
                "partial/dropped_left_over",
                "partial/dropped_unrewarded",
            ),
            "groups dropped: in total, past a limit of staleness or segments, by dynamic filtering, at the end of the "
            "data, without a reward",
            "few, except filtered",
            "stale: a larger budget, or `--partial.on_stale finish`",
        ),
        Guide(
            ("partial/tokens_wasted",),
            "tokens of dropped groups and of responses generated again",
            "a small part of the rollout",
            "as above",
        ),
        Guide(
            ("partial/slowest_share",),
            "fraction of generation with a single response left",
            "near 0",
            "a smaller budget",
        ),
    ),
    "Rewards that fail": (
        Guide(
            ("reward_fault/dropped",),
            "groups dropped since the last step",
            "0",
            "read the reward's log; `--reward_fault.*`",
        ),
        Guide(
            (
                "reward_fault/unreachable",
                "reward_fault/timeout",
                "reward_fault/http_status",
                "reward_fault/exception",
                "reward_fault/not_json",
                "reward_fault/missing_key",
                "reward_fault/wrong_length",
                "reward_fault/wrong_type",
                "reward_fault/none",
                "reward_fault/not_finite",
            ),
            "the same by reason",
            "not logged",
            "[troubleshooting](troubleshooting.md)",
        ),
    ),
}
"""The tables by the heading of their section in docs/metrics.md."""
