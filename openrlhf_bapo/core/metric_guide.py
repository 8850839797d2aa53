"""The meaning of every metric that we log, its healthy values, and the remedy for other values.

docs/metrics.md has these tables (tools/metrics_page.py writes them), and `openrlhf-bapo doctor` prints the remedies.
"""

from typing import NamedTuple


class Guide(NamedTuple):
    """A row of the tables: one metric, or several that are read together. All texts are Markdown."""

    metrics: tuple[str, ...]
    what: str
    start: str
    """Values at the start of a run."""
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
            "0.82 and 2.5; steady bounds start in the middle of their ranges, 0.75 and 2.1",
            "between the ends of their ranges: 0.75 to 0.86 and 2.1 to 2.8 with target 0.5; with `paper` 0.64 to 0.71 "
            "and 1.4 to 1.9",
            "always at the start of the search: the target is met without a raise, raise the target; always in the "
            "far corner: the target cannot be met, lower it, widen the ranges, or use `gradient`",
        ),
        Guide(
            ("bapo/positive_share",),
            "the positive share at the bounds, by `--bapo.contribution`",
            "0.46 to 0.47",
            "0.45 to 0.51, for a target of 0.5",
            "always below the target: as `bapo/clip_low`",
        ),
        Guide(
            ("bapo/initial_share",),
            "the share at the start of the search",
            "0.42 to 0.47",
            "near the start's; below 0.5 where wrong answers are longer",
            "falling: failures grow longer, or positives are stale; look at the lengths and at `offpolicy/ess`",
        ),
        Guide(
            ("bapo/target_reached",),
            "1 if the share at the bounds meets the target, else 0",
            "0 or 1",
            "any, if the share is near the target",
            "always 0: as `bapo/clip_low`",
        ),
        Guide(
            ("bapo/surrogate_share", "bapo/gradient_share"),
            "the share at the bounds by each `--bapo.contribution`, whichever the search uses",
            "equal while no token is clipped",
            "close to each other",
            "far apart: many tokens lie outside the bounds, see the clip fractions",
        ),
        Guide(
            ("bapo/positive_token_frac",),
            "tokens with a positive advantage as a fraction of tokens with a nonzero advantage (section 3 of the "
            "paper, Figure 4, shows positive tokens)",
            "the right answers' fraction of all tokens",
            "moves with the reward",
            "near 0 or 1: prompts too hard or too easy; dynamic filtering",
        ),
        Guide(
            ("bapo/clip_frac_positive",),
            "fraction of the tokens with $A > 0$ above the upper bound",
            "0.005 to 0.02",
            "below 0.04 with target 0.5; with `paper` 0.02 to 0.09 (PPO's 1.2 clips 0.03 to 0.09)",
            "above 0.1, as in runs where PPO fell apart: a lower learning rate or fewer updates per rollout",
        ),
        Guide(
            ("bapo/clip_frac_negative",),
            "fraction of the tokens with $A < 0$ below the lower bound",
            "0.08 to 0.11",
            "0.06 to 0.2",
            "above 0.25: a lower learning rate or fewer updates per rollout",
        ),
        Guide(
            ("bapo/found_low", "bapo/found_high", "bapo/found_share"),
            "with smoothing: the bounds that the search finds on the update alone, and the share at them",
            "as without smoothing",
            "around the bounds in use: 0.71 to 0.82 and 2.1 to 2.8",
            "always on one side of them: a shorter half-life",
        ),
        Guide(
            ("bapo/found_distance",),
            "distance of the bounds in use from the found ones, lower plus upper",
            "the scatter of the search",
            "level",
            "growing: a shorter half-life",
        ),
        Guide(
            ("bapo/negative_weight",),
            "with `--policy_loss balanced`: $s$, the factor of the weights of negative tokens",
            "depends on target and share; 1 where positive tokens carry their share",
            "below 1 where they do not",
            "near 0: hardly a positive token in an update; a larger batch, a half-life, or a lower target",
        ),
        Guide(
            ("timing/bapo_ratio_forward",),
            "seconds per training step in the forward for the ratios (OpenRLHF, Molt; part of the training phase)",
            "a forward over the samples ([performance](performance.md))",
            "constant",
            "too long: `--bapo.smoothing`, `--m2.half_life` and `--balanced.half_life` need no such forward",
        ),
        Guide(
            ("timing/bapo_search",),
            "seconds per training step in tallies and searches, with the wait for other ranks before a search "
            "(OpenRLHF, Molt; part of the training phase)",
            "0.01 of `timing/ppo_train` or less",
            "constant",
            "growing with the ranks: one of them is slower than the others",
        ),
    ),
    "Entropy": (
        Guide(
            ("entropy/predicted_change",),
            "sum of the four parts of the tokens trained on. Learning rate and Adam's scale are not in it: compare "
            "its trend with that of the measured entropy, not its size",
            "-0.07 to -0.04",
            "-0.08 to -0.01; near 0 keeps entropy",
            "below 0 while entropy collapses: see which part is to blame",
        ),
        Guide(
            ("entropy/positive_high_trained", "entropy/negative_low_trained"),
            "parts that lower entropy: likely tokens with $A > 0$, unlikely tokens with $A < 0$",
            "-0.15 to -0.09",
            "-0.17 to -0.09",
            "the second one alone grows: a higher lower bound (`--bapo.ratio_lower_start`)",
        ),
        Guide(
            ("entropy/positive_low_trained", "entropy/negative_high_trained"),
            "parts that raise entropy: unlikely tokens with $A > 0$, likely tokens with $A < 0$",
            "0.06 to 0.11",
            "0.06 to 0.13",
            "the first one is small: see the next row",
        ),
        Guide(
            ("entropy/positive_low_left_out", "entropy/negative_high_left_out"),
            "the rise of entropy that the clip prevents: tokens outside the bounds, as if trained on",
            "0 to 0.004",
            "0 to 0.007",
            "the first one is large: a higher upper bound (`--bapo.ratio_upper_max`)",
        ),
        Guide(
            ("entropy/positive_high_left_out", "entropy/negative_low_left_out"),
            "the fall of entropy that the clip prevents",
            "-0.02 to -0.01",
            "-0.08 to 0",
            "the second one is 0 while entropy collapses: a higher lower bound",
        ),
    ),
    "Responses": (
        Guide(
            ("rollout/response_length_positive_mean", "rollout/response_length_negative_mean"),
            "response length (tokens) by the sign of the advantage (section 3 of the paper, Figure 6)",
            "11 and 17",
            "9 to 12 and 12 to 19, falling",
            "the negative length grows, and the share falls with it: a length penalty, or a token budget",
        ),
        Guide(
            ("rollout/equal_reward_groups",),
            "groups of fresh samples whose rewards are all equal, so that their advantages are 0 (where the baseline "
            "is the mean of the batch: 1 if all are equal)",
            "not logged without a baseline",
            "some, where prompts are too easy or too hard",
            "most groups: they teach nothing; other prompts, more samples per prompt, or dynamic filtering",
        ),
        Guide(
            ("rollout/groups_left_over",),
            "groups of the last rollout of the data that fill no optimizer step and are dropped",
            "not logged",
            "once per pass over the prompts",
            "batch sizes that divide without a remainder",
        ),
        Guide(
            ("rollout/prompts_cut",),
            "prompts of the rollout that lost their first tokens, because `--data.max_len` leaves too little for them",
            "logged if the data have such prompts",
            "0",
            "a larger `--data.max_len`, or data without these prompts",
        ),
        Guide(
            ("rollout/samples_waiting",),
            "samples that a rollout made for later training steps (`--rollout.vllm_generate_batch_size`)",
            "0, or all but a training batch",
            "falling by a training batch per step until the next rollout",
            "it stays high: a sample is one version older for each batch before it; a smaller "
            "`--rollout.vllm_generate_batch_size`",
            note="(async training)",
        ),
    ),
    "Off-policy data": (
        Guide(
            ("offpolicy/ess",),
            "effective sample size of the ratios, a fraction",
            "1 on-policy; 0.96 to 0.97",
            "0.9 to 0.98",
            "below 0.85 (runs where PPO fell apart had 0.6 to 0.93): a lower learning rate, fewer updates per rollout, "
            "a shorter queue, a smaller `--replay.max_staleness`",
        ),
        Guide(
            ("offpolicy/ratio_mean",),
            "mean of the ratios",
            "1",
            "near 1, its expectation over samples of the behavior policy",
            "far from 1: the log-probs are not those of the behavior policy; see `offpolicy/engine_mismatch`",
        ),
        Guide(
            ("offpolicy/ratio_max",),
            "largest ratio",
            "1 on-policy; 2 to 3.2",
            "2 to 6",
            "above 20: `--actor.dual_clip 3` limits negative tokens with a large ratio",
        ),
        Guide(
            ("offpolicy/clip_frac_positive", "offpolicy/clip_frac_negative"),
            "tokens outside the bounds by the sign of their advantage",
            "as `bapo/clip_frac_positive` and `bapo/clip_frac_negative`",
            "as those",
            "as those",
        ),
        Guide(
            ("offpolicy/staleness_mean", "offpolicy/staleness_max"),
            "staleness of the tokens trained on, in versions",
            "0",
            "up to the queue's length, lag or `--replay.max_staleness`",
            "more: a shorter queue, more engines",
        ),
        Guide(
            ("offpolicy/optimizer_steps_mean", "offpolicy/optimizer_steps_max"),
            "optimizer steps between the weights that generated a token and the weights that train on it",
            "half of (updates per rollout minus one); updates per rollout minus one",
            "that, plus updates per rollout times staleness",
            "more: a shorter queue, more engines, or fewer updates per rollout",
        ),
        Guide(
            ("offpolicy/optimizer_steps_taken",),
            "optimizer steps of the training step, not counting skipped ones",
            "updates per rollout",
            "constant",
            "fewer: see `offpolicy/updates_skipped`",
        ),
        Guide(
            ("offpolicy/nonfinite_tokens",),
            "tokens left out of the loss and the search because their log-prob, ratio or advantage is not finite, in "
            "any epoch (logged with off-policy features, and whenever it is not 0)",
            "0",
            "0",
            "rewards or engines return NaN: check them",
        ),
        Guide(
            ("offpolicy/updates_skipped",),
            "optimizer steps skipped on all ranks because loss or gradient was not finite; weights, moments and "
            "learning rate do not change (logged by the rule of `offpolicy/nonfinite_tokens`)",
            "0",
            "0",
            "a lower learning rate; `--bapo.max_skipped_updates` ends a run with too many in a row",
        ),
        Guide(
            ("offpolicy/engine_mismatch",),
            "mean absolute difference between the engine's and the actor's log-probs on tokens of staleness 0",
            "0.001 to 0.009 in bf16, 2e-7 in fp32",
            "constant",
            "growing: engine and actor differ by more than rounding; give both the same precision, or take the ratio "
            "against the engine (`--offpolicy.ratio_base rollout`)",
        ),
        Guide(
            ("offpolicy/weight_negative",),
            "with tapered weights, the mean weight of tokens with a negative advantage",
            "1",
            "1 on fresh data, lower where tokens are stale",
            "near 0: stale responses no longer teach what to avoid; less staleness, or the level `token`",
        ),
        Guide(
            ("offpolicy/mixed_versions",),
            "fraction of fresh responses whose tokens come from more than one version (partial rollouts)",
            "0",
            "the fraction cut by the budget",
            "near 1: a larger `--partial.token_budget`",
        ),
    ),
    "Sample replay": (
        Guide(
            ("replay/size", "replay/bytes"),
            "groups in the pool, and their bytes",
            "0",
            "level at `--replay.capacity` or below",
            "bytes near the host's memory: a smaller capacity",
        ),
        Guide(
            ("replay/reuse_mean",),
            "mean number of times that the pool's groups were replayed",
            "0",
            "below `--replay.max_reuse`, at which a group leaves the pool; 0 with its default of 1",
            "near it, with too few `replay/groups_sampled`: a higher `--replay.max_reuse`, or more fresh samples",
        ),
        Guide(
            ("replay/groups_added", "replay/groups_sampled"),
            "groups kept, and groups drawn for replay",
            "some; 0",
            "sampled / (added + skipped) is at most `--replay.ratio`",
            "too few sampled: the pool is too small or too old",
        ),
        Guide(
            ("replay/groups_skipped",),
            "groups not kept because all their rewards are equal",
            "most, while right answers are rare",
            "falls as the reward rises",
            "near all: prompts too hard or too easy",
        ),
        Guide(
            ("replay/groups_expired", "replay/groups_exhausted", "replay/groups_evicted"),
            "groups dropped: too stale, replayed `--replay.max_reuse` times, no room",
            "0",
            "some",
            "expired before they are sampled: a larger `--replay.max_staleness`, a smaller capacity",
        ),
        Guide(
            ("replay/samples_dropped",),
            "samples of a short last rollout that filled no optimizer step",
            "0",
            "once per pass over the prompts",
            "batch sizes that divide without a remainder",
        ),
        Guide(
            ("replay/logs_dropped",),
            "names that the reward logs for only some samples, fresh or replayed; they are left out of the logs",
            "0",
            "0",
            "log the same names for all samples",
        ),
    ),
    "Partial rollouts": (
        Guide(
            ("partial/in_flight", "partial/waiting"),
            "unfinished and complete groups that wait after the hand-over",
            "0",
            "level",
            "growing: a larger `--partial.token_budget`",
        ),
        Guide(
            ("partial/started", "partial/taken"),
            "groups started, and groups handed over to training",
            "above the batch; the batch",
            "equal on average",
            "more started than taken: a larger `--partial.token_budget`",
        ),
        Guide(
            ("partial/resumed", "partial/finished"),
            "responses resumed, and responses finished as truncated by `--partial.on_stale finish`",
            "0",
            "some; few",
            "many finished: a larger budget",
        ),
        Guide(
            ("partial/segments_mean", "partial/segments_max"),
            "rollouts per response handed over",
            "1",
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
            "groups dropped: in total, too old or of too many segments, by dynamic filtering, that fill no "
            "optimizer step at the end of the data, with a response without a reward",
            "0",
            "few, except filtered",
            "stale: a larger budget, or `--partial.on_stale finish`",
        ),
        Guide(
            ("partial/tokens_wasted",),
            "tokens of dropped groups, and of responses that a resumed run generates again for lack of a reward",
            "0",
            "a small part of the rollout",
            "as above",
        ),
        Guide(
            ("partial/slowest_share",),
            "fraction of the generation time in which the last response ran alone",
            "grows with the tail of lengths without a budget",
            "near 0",
            "a smaller budget",
        ),
    ),
    "Rewards that fail": (
        Guide(
            ("reward_fault/dropped",),
            "groups dropped since the last step, those of an evaluation included",
            "0",
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
            "not logged",
            "[troubleshooting](troubleshooting.md)",
        ),
    ),
}
"""The tables by the heading of their section in docs/metrics.md."""
