"""Weights that correct a token's loss for its staleness, beside the clip (`--offpolicy.weight`).

Under the decoupled objective (Hilton et al., arXiv 2110.00641) ratio and clip are against pi_start, the policy that
training on the rollout starts from. What lies between it and pi_behavior, which generated the token, is a weight of the
token's loss, without a gradient. With s = pi_start / pi_behavior, of the token or of its whole response:

    none       1
    capped     min(s, cap)
    masked     s inside [low, high], 0 outside
    tapered    1 where A > 0, min(s, 1) where A < 0    the weights of TOPR (arXiv 2503.14286) beside a clip (ours)

With `tapered` fresh tokens have s = 1, so that the loss is that of the clip alone. With `capped` and `masked`, the IS
correction of OpenRLHF, their s is the mismatch of engine and trainer.
"""

import torch

WEIGHTS = ("none", "capped", "masked", "tapered")
LEVELS = ("token", "sequence")


def tapered_weights(log_s: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Return 1 where A > 0, and min(s, 1) elsewhere.

    Args:
        log_s: [batch, tokens], the logarithm of each token's s. Clamped to [-20, 20], as importance ratios are.
        advantages: [batch, tokens].
        mask: [batch, tokens], above 0 for the response's tokens; the others do not count in the response's s.
        level: s of each "token", or of the "sequence", the product over its tokens.

    Returns:
        [batch, tokens], in [0, 1], in float32 at least.
    """
    log_s = log_s.to(torch.promote_types(log_s.dtype, torch.float32))
    if level == "sequence":
        log_s = torch.where(mask > 0, log_s, 0.0).sum(-1, keepdim=True).expand_as(log_s)
    return torch.where(advantages > 0, 1.0, log_s.clamp(-20.0, 0.0).exp())
