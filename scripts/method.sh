# Sets the array METHOD_FLAGS to the flags of the method that METHOD names. The recipes and the quickstart source this.
#   grpo           OpenRLHF's own loss, clipped to [0.8, 1.2]
#   clip_higher    the same, clipped to [0.8, 1.28] (DAPO, arXiv 2503.14476)
#   static         the same, clipped to [1 - a, 1 + b] with CLIP_EPS="a b"; "0.2 0.5", the default, and "0.5 0.2" are
#                  two pairs of the paper's Figure 7
#   bapo           bounds recomputed for each update, with PRESET's settings and the paper's contributions
#   bapo_gradient  the same with --bapo.contribution gradient (ours)
# All methods divide by the probability under the policy that generated the token, and log bounds, positive share,
# clipped tokens and entropy.
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
