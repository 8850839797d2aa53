# Sourced by the recipes and the quickstart: sets the array METHOD_FLAGS, the flags of the method that METHOD names.
#   grpo           OpenRLHF's own loss, clipped to [0.8, 1.2]
#   clip_higher    the same, clipped to [0.8, 1.28] (DAPO, arXiv 2503.14476)
#   static         the same, clipped to [1 - a, 1 + b] of CLIP_EPS="a b"; the paper's Figure 7 has [0.8, 1.5], the default
#                  here, and [0.5, 1.2], which is CLIP_EPS="0.5 0.2"
#   bapo           bounds found for every update, with PRESET's settings and the paper's contributions
#   bapo_gradient  the same with --bapo.contribution gradient (ours)
# All take the ratio against the policy that generated the token, and log bounds, share, clipped tokens and entropy.
METHOD=${METHOD:-bapo}
METHOD_FLAGS=(--offpolicy.ratio_base auto --actor.entropy_coef 0)
case $METHOD in
  grpo) METHOD_FLAGS+=(--policy_loss ppo --actor.eps_clip_low_high 0.2 0.2) ;;
  clip_higher) METHOD_FLAGS+=(--policy_loss ppo --actor.eps_clip_low_high 0.2 0.28) ;;
  # shellcheck disable=SC2206  # two numbers
  static) METHOD_FLAGS+=(--policy_loss ppo --actor.eps_clip_low_high ${CLIP_EPS:-0.2 0.5}) ;;
  bapo) METHOD_FLAGS+=(--policy_loss bapo --bapo.preset "${PRESET:-readme}") ;;
  bapo_gradient) METHOD_FLAGS+=(--policy_loss bapo --bapo.preset "${PRESET:-readme}" --bapo.contribution gradient) ;;
  *)
    echo "METHOD=$METHOD: allowed: grpo, clip_higher, static, bapo, bapo_gradient" >&2
    exit 2
    ;;
esac
