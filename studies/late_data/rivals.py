"""Rules of other methods that only the study has. `walk.py --clip NAME` takes them by the names in RIVALS.

r = pi_theta / pi_behavior, A the advantage; a weight w stands for the gradient w A grad log pi.

    name   rule                                                                             source
    cispo  w = min(r, 1.28)                                                                 arXiv 2506.13585
    dis    w = r for 0.2 <= r <= 4, else 0                                                  arXiv 2607.07508
    sapo   w = 4 sigma (1 - sigma) r, sigma = sigmoid(t (r - 1)), t 1 (A > 0) or 1.05        arXiv 2511.20347
    gspo   w = s inside [1 - 0.03, 1 + 0.04], s the geometric mean of the response's ratios, arXiv 2507.18071
           times mean length / length: a mean per response, as there; the bounds are 100
           times as wide as there, because responses are short
    a3po   bounds [0.8^n, 1.2^n] for data that are n rollouts late                           arXiv 2512.06547
"""

import torch

from openrlhf_bapo import ClipRule, FixedBounds, Tokens
from openrlhf_bapo.rules.other_rules import TaperedWeights


class Cispo(TaperedWeights):
    def weights(self, tokens: Tokens) -> torch.Tensor:
        return tokens.ratio.clamp(max=1.28)


class Dis(TaperedWeights):
    def weights(self, tokens: Tokens) -> torch.Tensor:
        return tokens.ratio * ((tokens.ratio >= 0.2) & (tokens.ratio <= 4.0))


class Sapo(TaperedWeights):
    def weights(self, tokens: Tokens) -> torch.Tensor:
        temperature = torch.where(tokens.advantages > 0, 1.0, 1.05)
        sigma = (temperature * (tokens.ratio - 1)).sigmoid()
        return 4 * sigma * (1 - sigma) * tokens.ratio


class Gspo(TaperedWeights):
    def weights(self, tokens: Tokens) -> torch.Tensor:
        log_ratio = (tokens.log_probs - tokens.behavior_log_probs) * (tokens.weight > 0)
        ratio = (log_ratio.sum(-1, keepdim=True) / (tokens.weight > 0).sum(-1, keepdim=True)).exp()
        inside = torch.where(tokens.advantages > 0, ratio <= 1.04, ratio >= 0.97)
        length = (tokens.weight > 0).sum(-1, keepdim=True)
        return ratio * inside * length.double().mean().float() / length


def a3po(lag: int) -> ClipRule:
    return FixedBounds(0.8 ** max(lag, 1), 1.2 ** max(lag, 1))


RIVALS = {"cispo": Cispo, "dis": Dis, "sapo": Sapo, "gspo": Gspo}
