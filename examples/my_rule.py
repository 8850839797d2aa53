"""SAPO (arXiv 2511.20347) as a clip rule of one's own. docs/algorithm.md says how to write one.

METHOD=examples/my_rule.py:Sapo bash scripts/train_bapo_quickstart.sh --rule.negative 1.1
"""

import torch

from openrlhf_bapo import Tokens, WeightRule


class Sapo(WeightRule):
    """A soft gate in place of the clip: w = 4 sigma (1 - sigma) r, with sigma = sigmoid(t (r - 1)).

    Args:
        positive: t where A > 0, above 0.
        negative: t where A < 0, above 0.
    """

    def __init__(self, positive: float = 1.0, negative: float = 1.05) -> None:
        super().__init__()
        if min(positive, negative) <= 0:
            raise ValueError(f"positive {positive} and negative {negative} are not allowed; both must be above 0")
        self.positive, self.negative = positive, negative

    def weights(self, tokens: Tokens) -> torch.Tensor:
        """Return w, in the tokens' shape."""
        t = torch.full_like(tokens.ratio, self.negative).masked_fill(tokens.advantages > 0, self.positive)
        sigma = (t * (tokens.ratio - 1)).sigmoid()
        return 4 * sigma * (1 - sigma) * tokens.ratio
