# Sets the array METHOD_FLAGS to the flags of the method that METHOD names. The recipes and the quickstart source this.
#   grpo           OpenRLHF's own loss, clipped to [0.8, 1.2]
#   clip_higher    the same, clipped to [0.8, 1.28] (DAPO, arXiv 2503.14476)
#   static         the same, clipped to [1 - a, 1 + b] with CLIP_EPS="a b"; "0.2 0.5", the default, and "0.5 0.2" are
#                  two pairs of the paper's Figure 7 (section 4.1)
#   stock          OpenRLHF as it comes, for stale data: [0.8, 1.2] around the policy that the training step starts from
#   stock_is       the same with OpenRLHF's IS correction, as its default is: per token, 0 outside [0.5, 5]
#   tapered        [0.8, 1.2] as in stock; a stale token of negative advantage weighs less (docs/off_policy.md; ours)
#   bapo           the rule of PRESET: bounds searched in each update, or averaged with PRESET=steady
#   bapo_gradient  the same with --bapo.contribution gradient (ours)
#   bapo_tapered   bapo on the ratio of tapered, with its weights (ours)
#   FILE.py:CLASS, MODULE:CLASS, NAME   a rule of your own, or of an installed package (docs/algorithm.md)
#   m2, divergence, topr, balanced   rules of other methods, and ours (docs/algorithm.md)
# All methods but stock, stock_is and the tapered ones divide by the probability under the policy that generated the
# token. All log positive share and entropy, and all but divergence, topr and balanced their bounds.
METHOD=${METHOD:-bapo}
ratio_base=auto
TAPERED=(--offpolicy.objective decoupled --offpolicy.weight tapered)
case $METHOD in
  grpo) METHOD_FLAGS=(--policy_loss ppo --actor.eps_clip_low_high 0.2 0.2) ;;
  clip_higher) METHOD_FLAGS=(--policy_loss ppo --actor.eps_clip_low_high 0.2 0.28) ;;
  # shellcheck disable=SC2206  # two numbers
  static) METHOD_FLAGS=(--policy_loss ppo --actor.eps_clip_low_high ${CLIP_EPS:-0.2 0.5}) ;;
  stock | stock_is)
    ratio_base=recomputed
    METHOD_FLAGS=(--policy_loss ppo --actor.eps_clip_low_high 0.2 0.2)
    if [ "$METHOD" = stock_is ]; then METHOD_FLAGS+=(--algo.advantage.is_correction_level token); fi
    ;;
  tapered) METHOD_FLAGS=(--policy_loss ppo --actor.eps_clip_low_high 0.2 0.2 "${TAPERED[@]}") ;;
  bapo_tapered) METHOD_FLAGS=(--policy_loss bapo --bapo.preset "${PRESET:-paper}" "${TAPERED[@]}") ;;
  bapo) METHOD_FLAGS=(--policy_loss bapo --bapo.preset "${PRESET:-paper}") ;;
  bapo_gradient) METHOD_FLAGS=(--policy_loss bapo --bapo.preset "${PRESET:-paper}" --bapo.contribution gradient) ;;
  m2 | divergence | topr | balanced) METHOD_FLAGS=(--policy_loss "$METHOD") ;;
  *.py:* | *[a-z]:[A-Z]*) METHOD_FLAGS=(--policy_loss "$METHOD") ;;
  *)
    # An installed package may name a rule; before the set-up there is none.
    if .venv/bin/python -c '
import sys
from importlib.metadata import entry_points
sys.exit(sys.argv[1] not in entry_points(group="openrlhf_bapo.rules").names)' "$METHOD" 2>/dev/null; then
      METHOD_FLAGS=(--policy_loss "$METHOD")
    else
      names="grpo, clip_higher, static, stock, stock_is, tapered, bapo, bapo_gradient, bapo_tapered, m2, divergence, "
      names+="topr, balanced, FILE.py:CLASS"
      echo "METHOD=$METHOD: allowed: $names" >&2
      exit 2
    fi
    ;;
esac
METHOD_FLAGS+=(--offpolicy.ratio_base $ratio_base --actor.entropy_coef 0)
