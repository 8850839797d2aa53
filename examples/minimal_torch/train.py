"""BAPO in a plain PyTorch policy-gradient loop, in a few seconds on one core: python examples/minimal_torch/train.py

The task: the prompt is a digit, and a response is right if its last token before END is that digit. The policy is a
table of logits, one row per prompt and previous token. The lines marked "BAPO" replace PPO's fixed bounds 0.8 and 1.2.
"""

import torch

from openrlhf_bapo import ClipConfig, find_clip_bounds

NUM_DIGITS, END, MAX_TOKENS = 10, 10, 16
NUM_PROMPTS, SAMPLES_PER_PROMPT, NUM_ROLLOUTS, STEPS_PER_ROLLOUT = 32, 16, 40, 8


def log_probs_of(logits, prompts, responses):
    """Return the log-prob of every response token, [rows, MAX_TOKENS]. END also stands for the start of a response."""
    previous = torch.cat([torch.full_like(responses[:, :1], END), responses[:, :-1]], dim=1)
    log_probs = logits[prompts[:, None], previous].log_softmax(-1)
    return log_probs.gather(2, responses[:, :, None]).squeeze(2)


@torch.no_grad()
def rollout(logits):
    """Return prompts [rows], responses and their mask [rows, MAX_TOKENS], and rewards [rows]."""
    prompts = torch.randint(NUM_DIGITS, (NUM_PROMPTS,)).repeat_interleave(SAMPLES_PER_PROMPT)
    responses = torch.full((len(prompts), MAX_TOKENS), END)
    previous, alive, last = responses[:, 0], torch.ones_like(prompts, dtype=torch.bool), torch.full_like(prompts, END)
    for t in range(MAX_TOKENS):
        token = torch.multinomial(logits[prompts, previous].softmax(-1), 1).squeeze(1)
        previous = responses[:, t] = torch.where(alive, token, END)
        alive = alive & (previous != END)
        last = torch.where(alive, previous, last)
    mask = (responses == END).cumsum(1) <= 1  # tokens up to and including the first END
    return prompts, responses, mask.float(), (~alive & (last == prompts)).float()


def main():
    torch.manual_seed(0)
    logits = torch.zeros(NUM_DIGITS, NUM_DIGITS + 1, NUM_DIGITS + 1, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.02)
    config = ClipConfig.preset("paper")  # BAPO: the target for the positive share, and the ranges of both bounds
    for number in range(NUM_ROLLOUTS):
        prompts, responses, mask, rewards = rollout(logits)
        old_log_probs = log_probs_of(logits, prompts, responses).detach()  # of the policy that made the rollout
        groups = rewards.view(NUM_PROMPTS, SAMPLES_PER_PROMPT)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        advantages = advantages.view(-1, 1).expand_as(mask)
        found = []
        for rows in torch.randperm(len(prompts)).chunk(STEPS_PER_ROLLOUT):
            ratio = (log_probs_of(logits, prompts[rows], responses[rows]) - old_log_probs[rows]).exp()
            a, m = advantages[rows], mask[rows]
            bounds = find_clip_bounds(ratio.detach(), a, m, config)  # BAPO: bounds from all tokens of this step
            clipped = ratio.clamp(bounds.lower, bounds.upper)  # BAPO: PPO has ratio.clamp(0.8, 1.2)
            loss = -(torch.minimum(ratio * a, clipped * a) * m).sum() / m.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(torch.stack([bounds.lower, bounds.upper, bounds.positive_share]))
        lower, upper, share = torch.stack(found).nanmean(0)  # means over the steps
        text = f"rollout {number:2}  reward {rewards.mean():.2f}  bounds [{lower:.2f}, {upper:.2f}]"
        print(f"{text}  positive share {share:.2f}")


if __name__ == "__main__":
    main()
