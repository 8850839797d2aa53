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
            "inside their ranges: 0.75 to 0.86 and 2.1 to 2.8 with target 0.5; `paper`: 0.64 to 0.71 and 1.4 to 1.9",
            "always at the start of the search: the target is met without a raise, raise the target; always in the "
            "far corner: the target cannot be met, lower it, widen the ranges, or use `gradient`",
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
            "level; below 0.5 where wrong answers are longer",
            "falling: failures grow longer, or positives are stale; look at the lengths and at `offpolicy/ess`",
        ),
        Guide(
            ("bapo/target_reached",),
            "1 if the share at the bounds meets the target, else 0",
            "any, if the share is near the target",
            "always 0: as `bapo/clip_low`",
        ),
        Guide(
            ("bapo/surrogate_share", "bapo/gradient_share"),
            "the share by each `--bapo.contribution`",
            "close to each other",
            "far apart: many tokens lie outside the bounds, see the clip fractions",
        ),
        Guide(
            ("bapo/positive_token_frac",),
            "tokens with $A > 0$ as a fraction of those with $A \\ne 0$ (the paper's section 3, Figure 4)",
            "moves with the reward",
            "near 0 or 1: prompts too hard or too easy; dynamic filtering",
        ),
        Guide(
            ("bapo/clip_frac_positive",),
            "fraction of the tokens with $A > 0$ above the upper bound",
            "below 0.04 with target 0.5; `paper`: 0.02 to 0.09; PPO: 0.03 to 0.09",
            "above 0.1, as in runs where PPO fell apart: a lower learning rate or fewer updates per rollout",
        ),
        Guide(
            ("bapo/clip_frac_negative",),
            "fraction of the tokens with $A < 0$ below the lower bound",
            "0.06 to 0.2",
            "above 0.25: a lower learning rate or fewer updates per rollout",
        ),
        Guide(
            ("bapo/found_low", "bapo/found_high", "bapo/found_share"),
            "with smoothing: bounds and share that the search finds on the update alone",
            "around the bounds in use: 0.71 to 0.82 and 2.1 to 2.8",
            "always on one side of them: a shorter half-life",
        ),
        Guide(
            ("bapo/found_distance",),
            "distance of the bounds in use from the found ones, lower plus upper",
            "level",
            "growing: a shorter half-life",
        ),
        Guide(
            ("bapo/negative_weight",),
            "with `--policy_loss balanced`: $s$, the factor of the weights of negative tokens",
            "1, or below where positive tokens lack their share",
            "near 0: hardly a positive token in an update; a larger batch, a half-life, or a lower target",
        ),
        Guide(
            ("timing/bapo_ratio_forward",),
            "seconds per training step in the forward for the ratios (OpenRLHF, Molt)",
            "constant",
            "too long: `--bapo.smoothing`, `--m2.half_life` and `--balanced.half_life` need no such forward",
        ),
        Guide(
            ("timing/bapo_search",),
            "the same in tallies and searches, with the wait for other ranks",
            "0.01 of `timing/ppo_train` or less",
            "growing with the ranks: one of them is slower than the others",
        ),
    ),
    "Entropy": (
        Guide(
            ("entropy/predicted_change",),
            "sum of the parts of the tokens trained on: compare its trend, not its size, with the measured entropy",
            "-0.08 to -0.01; near 0 keeps entropy",
            "below 0 while entropy collapses: see which part is to blame",
        ),
        Guide(
            ("entropy/positive_high_trained", "entropy/negative_low_trained"),
            "parts that lower entropy: likely tokens with $A > 0$, unlikely tokens with $A < 0$",
            "-0.17 to -0.09",
            "the second one alone grows: a higher lower bound (`--bapo.ratio_lower_start`)",
        ),
        Guide(
            ("entropy/positive_low_trained", "entropy/negative_high_trained"),
            "parts that raise entropy: unlikely tokens with $A > 0$, likely tokens with $A < 0$",
            "0.06 to 0.13",
            "the first one is small: see the next row",
        ),
        Guide(
            ("entropy/positive_low_left_out", "entropy/negative_high_left_out"),
            "the rise of entropy that the clip prevents",
            "0 to 0.007",
            "the first one is large: a higher upper bound (`--bapo.ratio_upper_max`)",
        ),
        Guide(
            ("entropy/positive_high_left_out", "entropy/negative_low_left_out"),
            "the fall of entropy that the clip prevents",
            "-0.08 to 0",
            "the second one is 0 while entropy collapses: a higher lower bound",
        ),
    ),
    "Responses": (
        Guide(
            ("rollout/response_length_positive_mean", "rollout/response_length_negative_mean"),
            "response length (tokens) by the advantage's sign (the paper's section 3, Figure 6)",
            "9 to 12 and 12 to 19, falling",
            "the negative length grows, and the share falls with it: a length penalty, or a token budget",
        ),
        Guide(
            ("rollout/equal_reward_groups",),
            "fresh groups whose rewards are all equal, so that their advantages are 0",
            "some",
            "most groups: they teach nothing; other prompts, more samples per prompt, or dynamic filtering",
        ),
        Guide(
            ("rollout/groups_left_over",),
            "groups dropped at the end of the data, because they fill no optimizer step",
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
            "it stays high: a sample is one version older for each batch before it; a smaller "
            "`--rollout.vllm_generate_batch_size`",
            note="(async training)",
        ),
    ),
    "Off-policy data": (
        Guide(
            ("offpolicy/ess",),
            "effective sample size of the ratios, a fraction",
            "0.9 to 0.98; 1 on-policy",
            "below 0.85 (runs where PPO fell apart had 0.6 to 0.93): a lower learning rate, fewer updates per rollout, "
            "a shorter queue, a smaller `--replay.max_staleness`",
        ),
        Guide(
            ("offpolicy/ratio_mean",),
            "mean of the ratios",
            "near 1",
            "far from 1: the log-probs are not those of the behavior policy; see `offpolicy/engine_mismatch`",
        ),
        Guide(
            ("offpolicy/ratio_max",),
            "largest ratio",
            "2 to 6; 1 on-policy",
            "above 20: `--actor.dual_clip 3` limits negative tokens with a large ratio",
        ),
        Guide(
            ("offpolicy/clip_frac_positive", "offpolicy/clip_frac_negative"),
            "tokens outside the bounds by the sign of their advantage",
            "as `bapo/clip_frac_positive` and `bapo/clip_frac_negative`",
            "as those",
        ),
        Guide(
            ("offpolicy/staleness_mean", "offpolicy/staleness_max"),
            "staleness of the tokens trained on, in versions",
            "up to the queue's length, lag or `--replay.max_staleness`",
            "more: a shorter queue, more engines",
        ),
        Guide(
            ("offpolicy/optimizer_steps_mean", "offpolicy/optimizer_steps_max"),
            "optimizer steps since the weights that generated a token",
            "up to updates per rollout - 1, plus updates per rollout times staleness",
            "more: a shorter queue, more engines, or fewer updates per rollout",
        ),
        Guide(
            ("offpolicy/optimizer_steps_taken",),
            "optimizer steps of the training step, not counting skipped ones",
            "updates per rollout",
            "fewer: see `offpolicy/updates_skipped`",
        ),
        Guide(
            ("offpolicy/nonfinite_tokens",),
            "tokens left out because their log-prob, ratio or advantage is not finite; always logged if not 0",
            "0",
            "rewards or engines return NaN: check them",
        ),
        Guide(
            ("offpolicy/updates_skipped",),
            "optimizer steps skipped because loss or gradient was not finite; logged likewise",
            "0",
            "a lower learning rate; `--bapo.max_skipped_updates` ends a run with too many in a row",
        ),
        Guide(
            ("offpolicy/engine_mismatch",),
            "mean absolute difference of the engine's and the actor's log-probs at staleness 0",
            "constant: 0.001 to 0.009 in bf16, 2e-7 in fp32",
            "growing: engine and actor differ by more than rounding; give both the same precision, or take the ratio "
            "against the engine (`--offpolicy.ratio_base rollout`)",
        ),
        Guide(
            ("offpolicy/weight_negative",),
            "mean tapered weight of tokens with $A < 0$",
            "1 on fresh data; in a run late by 8 from 0.16 to 0.79, by token from 0.78 to 0.97",
            "below 0.1: stale responses hardly teach what to avoid; less staleness, or `--offpolicy.weight_level "
            "token`",
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
            "near it, with too few `replay/groups_sampled`: a higher `--replay.max_reuse`, or more fresh samples",
        ),
        Guide(
            ("replay/groups_added", "replay/groups_sampled"),
            "groups kept, and groups drawn for replay",
            "sampled / (added + skipped) is at most `--replay.ratio`",
            "too few sampled: the pool is too small or too old",
        ),
        Guide(
            ("replay/groups_skipped",),
            "groups not kept because all their rewards are equal",
            "falls as the reward rises",
            "near all: prompts too hard or too easy",
        ),
        Guide(
            ("replay/groups_expired", "replay/groups_exhausted", "replay/groups_evicted"),
            "groups dropped: too stale, replayed `--replay.max_reuse` times, no room",
            "some",
            "expired before they are sampled: a larger `--replay.max_staleness`, a smaller capacity",
        ),
        Guide(
            ("replay/samples_dropped",),
            "samples of a short last rollout that filled no optimizer step",
            "once per pass over the prompts",
            "batch sizes that divide without a remainder",
        ),
        Guide(
            ("replay/logs_dropped",),
            "names that the reward logs for only some samples; they are left out",
            "0",
            "log the same names for all samples",
        ),
    ),
    "Partial rollouts": (
        Guide(
            ("partial/in_flight", "partial/waiting"),
            "unfinished and complete groups that wait after the hand-over",
            "level",
            "growing: a larger `--partial.token_budget`",
        ),
        Guide(
            ("partial/started", "partial/taken"),
            "groups started, and groups handed over to training",
            "equal on average",
            "more started than taken: a larger `--partial.token_budget`",
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
            "groups dropped: in total, too old or of too many segments, by dynamic filtering, at the end of the data, "
            "without a reward",
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
            "fraction of generation in which the last response ran alone",
            "near 0",
            "a smaller budget",
        ),
    ),
    "Rewards that fail": (
        Guide(
            ("reward_fault/dropped",),
            "groups dropped since the last step, also in evaluation",
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
