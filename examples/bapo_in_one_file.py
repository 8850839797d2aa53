"""BAPO in one file, beside PPO: a tiny policy, a task, stale samples, Algorithm 1, and the curves of both.

python examples/bapo_in_one_file.py

It takes about a minute, draws bapo_in_one_file.png, and needs torch and matplotlib. The package does the same for
language models; tests/unit/test_one_file.py holds the two searches to the same bounds.
"""

import copy
from collections import deque

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import one_hot

# The task: walk on a ring from a start to a goal, and stop there. A response is a list of moves; the last token stops.
RING, MOVES = 24, torch.tensor([-1, 1, 5, 0])
STOP, MOST_TOKENS = 3, 24
PROMPTS, SAMPLES = 32, 8  # per rollout: prompts, and responses to each
ROLLOUTS, UPDATES, RATE = 120, 4, 2e-3
LATE = 6  # rollouts between the policy that generates samples and the policy that is trained on them

# BAPO's settings (section 5.1 of the paper): where the positive share should be, and how far each bound may go.
TARGET = 0.4
LOWER_START, LOWER_MAX, LOWER_STEP = 0.6, 0.9, 0.02
UPPER_START, UPPER_MAX, UPPER_STEP = 1.2, 3.0, 0.05


def positive_share(ratio: torch.Tensor, advantage: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    """Return the positive tokens' part of the objective: our reading of the paper's section 4.2, Eq. 8."""
    positive = (advantage * ratio.clamp(max=upper))[advantage > 0].sum()
    negative = (-advantage * ratio.clamp(min=lower))[advantage < 0].sum()
    return positive / (positive + negative)


def find_bounds(ratio: torch.Tensor, advantage: torch.Tensor) -> tuple[float, float]:
    """Algorithm 1 (section 4.2): raise the upper bound, then the lower one, until the share reaches the target."""
    highest = [int((UPPER_MAX - UPPER_START) / UPPER_STEP + 1e-6), int((LOWER_MAX - LOWER_START) / LOWER_STEP + 1e-6)]
    upper_raises = lower_raises = 0
    while True:
        lower, upper = LOWER_START + lower_raises * LOWER_STEP, UPPER_START + upper_raises * UPPER_STEP
        if positive_share(ratio, advantage, lower, upper) >= TARGET:
            return lower, upper
        if upper_raises < highest[0]:
            upper_raises += 1
        elif lower_raises < highest[1]:
            lower_raises += 1
        else:
            return lower, upper


def clipped_loss(ratio: torch.Tensor, advantage: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    """PPO's loss: a token whose ratio is beyond the bound on its advantage's side has no gradient."""
    return -torch.min(ratio * advantage, ratio.clamp(lower, upper) * advantage).mean()


def distribution(
    policy: torch.nn.Module, position: torch.Tensor, goal: torch.Tensor
) -> torch.distributions.Categorical:
    """Return the policy's distribution of the next move."""
    state = one_hot((goal - position) % RING, RING).float()
    return torch.distributions.Categorical(logits=policy(state))


@torch.no_grad()
def rollout(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Generate responses, and return their tokens: state, move, log-prob under this policy, and advantage."""
    position, goal = torch.randint(RING, (2, PROMPTS)).repeat_interleave(SAMPLES, dim=1)
    active, steps = torch.ones_like(goal, dtype=torch.bool), []
    for _ in range(MOST_TOKENS):
        chosen = distribution(policy, position, goal)
        move = chosen.sample()
        steps.append((position, move, chosen.log_prob(move), active))
        position = torch.where(active, (position + MOVES[move]) % RING, position)
        active = active & (move != STOP)
    reward = ((position == goal) & ~active).float().view(PROMPTS, SAMPLES)
    # GRPO: the advantage is the reward relative to the other responses to the prompt, the same for all their tokens.
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
    positions, moves, log_probs, mask = (torch.stack(values) for values in zip(*steps, strict=True))
    everywhere = {"goal": goal.expand_as(moves), "advantage": advantage.flatten().expand(moves.shape)}
    tokens = {"position": positions, "move": moves, "log_prob": log_probs, **everywhere}
    return {name: values[mask] for name, values in tokens.items()} | {"reward": reward.mean()}


def train(method: str, seed: int) -> dict[str, list[float]]:
    """Train a policy with "ppo" or "bapo" on late samples; return what it does after each rollout."""
    torch.manual_seed(seed)
    policy = torch.nn.Sequential(torch.nn.Linear(RING, 64), torch.nn.Tanh(), torch.nn.Linear(64, len(MOVES)))
    optimizer = torch.optim.Adam(policy.parameters(), RATE)
    older: deque[torch.nn.Module] = deque(maxlen=LATE + 1)
    history: dict[str, list[float]] = {"accuracy": [], "entropy": [], "upper bound": []}
    for _ in range(ROLLOUTS):
        older.append(copy.deepcopy(policy))
        tokens = rollout(older[0])  # the behavior policy: its weights are LATE rollouts old
        shuffled, uppers, entropies = torch.randperm(len(tokens["move"])), [], []
        for part in shuffled.chunk(UPDATES):
            batch = {name: values[part] for name, values in tokens.items() if name != "reward"}
            now = distribution(policy, batch["position"], batch["goal"])
            ratio = (now.log_prob(batch["move"]) - batch["log_prob"]).exp()  # the importance ratio
            bounds = find_bounds(ratio.detach(), batch["advantage"]) if method == "bapo" else (0.8, 1.2)
            optimizer.zero_grad()
            clipped_loss(ratio, batch["advantage"], *bounds).backward()
            optimizer.step()
            uppers.append(bounds[1])
            entropies.append(now.entropy().mean().item())
        history["accuracy"].append(rollout(policy)["reward"].item())
        history["entropy"].append(sum(entropies) / UPDATES)
        history["upper bound"].append(sum(uppers) / UPDATES)
    return history


def main() -> None:
    """Train both methods with three seeds, print their last accuracy and entropy, and draw the curves."""
    seeds = range(3)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5))
    for method, color in (("ppo", "tab:gray"), ("bapo", "tab:blue")):
        runs = [train(method, seed) for seed in seeds]
        for axis, name in zip(axes, runs[0], strict=True):
            curves = torch.tensor([run[name] for run in runs])
            axis.plot(curves.T, color=color, alpha=0.3, linewidth=1)
            axis.plot(curves.mean(0), color=color, label=method)
            axis.set(title=name, xlabel="rollouts")
        last = {name: sum(sum(run[name][-20:]) / 20 for run in runs) / len(runs) for name in runs[0]}
        print(f"{method}: accuracy {last['accuracy']:.2f}, entropy {last['entropy']:.2f} in the last 20 rollouts")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig("bapo_in_one_file.png", dpi=120)


if __name__ == "__main__":
    main()
