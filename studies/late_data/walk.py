"""One training run of the study, on one core: a tiny transformer learns to walk on a grid from stale samples.

A prompt is a start and a goal. A response is a sequence of moves and END. It is right if it ends on the goal and never
leaves the grid. Wrong walks are longer than right ones, so positive tokens carry less than half of the objective. That
is the imbalance that BAPO addresses. `train_on` has everything that BAPO changes.
"""

import argparse
from dataclasses import dataclass, fields, replace
from math import nan
from pathlib import Path
from types import SimpleNamespace

import torch
from rivals import RIVALS, a3po
from torch.nn import Embedding, LayerNorm, Linear, ModuleDict, ModuleList
from torch.nn.functional import gelu, scaled_dot_product_attention

from openrlhf_bapo import ClipConfig, ClipRule, FixedBounds, SmoothingConfig, Tokens, importance_ratio, make_clip_rule
from openrlhf_bapo.rules.entropy_rule import EntropyRule
from openrlhf_bapo.rules.other_rules import RULES, rule_class
from openrlhf_bapo.rules.staleness_weights import tapered_weights

MOVES = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]])  # (rows, columns) moved by each response token
END = 4
CHECKPOINTS = 15  # evenly spaced evaluations on held-out prompts in a run
ENDPOINT_SAMPLES = 24  # per held-out prompt over the last fifth of a run, all of whose rollouts are evaluated
FIXED_BOUNDS = {"ppo": (0.8, 1.2), "clip_higher": (0.8, 1.28), "none": (1e-9, 1e9)}


@dataclass(frozen=True)
class Run:
    """The settings of a training run; each field is a flag of the command."""

    task: str = "walk"
    seed: int = 0
    lr: float = 1e-4
    # a preset of ClipConfig, a name in FIXED_BOUNDS, LOWER:UPPER, or a rule as RULE:NAME=VALUE,...; RULE may be
    # FILE.py:CLASS
    clip: str = "readme"
    base: str = (
        "behavior"  # denominator of the ratio: "behavior", or "start", the policy before training on the rollout
    )
    # weight by s = start / behavior: "clip" (s, at most 2), "mask" (s, 0 outside [0.5, 5]); "taper" and
    # "taper_sequence" (1 where A > 0, else min(s, 1), with s of the token or of the whole response)
    correction: str = ""
    step: str = ""  # "vcpo" scales the learning rate of each update by the root of its effective sample size
    contribution: str = ""  # "surrogate" or "gradient"; "" keeps the preset's
    target: float = 0.0  # target for the positive share; 0 keeps the preset's
    half_life: float = 0.0  # of the bounds' moving average, in updates; 0 keeps the preset's
    smoothing_of: str = "bounds"  # what is averaged: "bounds" or "tally"
    same_update: bool = False  # the average includes the update that uses it
    token_weight: str = ""  # "rollout_prob" weighs a token in the search by its probability under the behavior policy
    dual_clip: float = 0.0  # dual clip's constant; 0: no dual clip
    lag: int = 0  # number of rollouts between making a rollout and training on it
    mixed: bool = False  # each part of a rollout waits for 0 to `lag` rollouts
    wrong: float = 0.0  # share of wrong responses to select for each prompt, from twice as many
    replay: int = 0  # past rollouts from which as many prompts as are fresh are trained on once more
    epochs: int = 1
    updates: int = 8  # per epoch
    rollouts: int = 60
    prompts: int = 32  # per rollout
    samples: int = 16  # per prompt
    starts: str = "runs/late_data/starts"  # folder for the fine-tuned start policy of each task and seed
    then: str = ""  # ROLLOUT:FLAG=NUMBER changes a setting in the middle of the run, such as 30:lr=2e-4
    out: str = ""  # CSV with one row per rollout, written when the run is complete


def token_mask(responses: torch.Tensor) -> torch.Tensor:
    """Return a mask over response tokens, [rows, num]: True up to and including the first END."""
    return (responses == END).cumsum(1) - (responses == END).long() == 0


@dataclass(frozen=True)
class Walk:
    """The task: walk from a start to a goal on a grid. other_tasks.py has tasks with the same interface."""

    num_values: int  # rows and columns of the grid: values of a prompt token
    max_tokens: int  # maximum response length
    random_moves: float  # share of random moves in the demonstrations
    finetune_steps: int
    straight: float = 0.0  # share of the other moves that go to the goal's row first, then along it
    num_actions: int = 5  # including END
    prompt_tokens: int = 4  # the start's row and column, the goal's row and column

    def prompts(self) -> torch.Tensor:
        """Return every prompt whose start and goal differ, [num, prompt_tokens]."""
        prompts = torch.cartesian_prod(*[torch.arange(self.num_values)] * self.prompt_tokens)
        return prompts[(prompts[:, :2] != prompts[:, 2:4]).any(1)]

    def reward(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return 1 for a walk that ends on the goal and never leaves the grid, else 0. Padding after END is END."""
        path = prompts[:, None, :2] + MOVES[responses].cumsum(1)
        inside = ((path >= 0) & (path < self.num_values)).all(2).all(1)
        return (inside & (path[:, -1] == prompts[:, 2:4]).all(1) & (responses[:, -1] == END)).float()

    def demonstrate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return responses that head for the goal, except for a share of `random_moves`, which may leave the goal."""
        at, responses = prompts[:, :2].clone(), torch.empty(len(prompts), self.max_tokens, dtype=torch.long)
        for step in range(self.max_tokens):
            nearer = ((prompts[:, 2:4] - at)[:, None] * MOVES).sum(2) > 0
            nearer[:, END] = ~nearer.any(1)
            if self.straight:
                chosen = torch.rand(len(prompts), 1) < self.straight
                nearer &= ~chosen | (nearer.cumsum(1) == 1)
            within = ((at[:, None] + MOVES >= 0) & (at[:, None] + MOVES < self.num_values)).all(2)
            within[:, END] = False
            strays = torch.rand(len(prompts), 1) < self.random_moves
            responses[:, step] = torch.multinomial(torch.where(strays, within, nearer).float(), 1).squeeze(1)
            at += MOVES[responses[:, step]]
        return torch.where(token_mask(responses), responses, END)


TASKS = {"walk": Walk(10, 40, 0.35, 140)}


def split_prompts(task: Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a task's prompts, shuffled: (training prompts, 256 held-out prompts)."""
    prompts = task.prompts()
    prompts = prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))]
    return prompts[256:], prompts[:256]


class Policy(torch.nn.Module):
    """A transformer over prompt values and actions; its head has logits for actions only."""

    def __init__(self, task: Walk, width: int = 96, num_layers: int = 3, heads: int = 4):
        super().__init__()
        self.num_actions, self.prompt_tokens, self.heads = task.num_actions, task.prompt_tokens, heads
        self.tokens = Embedding(task.num_actions + task.num_values, width)
        self.positions = Embedding(task.prompt_tokens + task.max_tokens, width)
        self.norm, self.head, self.layers = LayerNorm(width), Linear(width, task.num_actions), ModuleList()
        for _ in range(num_layers):
            attention = {"norm1": LayerNorm(width), "qkv": Linear(width, 3 * width), "out": Linear(width, width)}
            mlp = {"norm2": LayerNorm(width), "up": Linear(width, 4 * width), "down": Linear(4 * width, width)}
            self.layers.append(ModuleDict(attention | mlp))
        torch.nn.init.normal_(self.tokens.weight, std=0.02)
        torch.nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, caches: list | None = None, start: int = 0) -> torch.Tensor:
        """Return log-probs of the next action after each token, [rows, num, actions].

        With `caches`, `tokens` continue the cached ones and the first is at position `start`.
        """
        (rows, num), end = tokens.shape, start + tokens.shape[1]
        x = self.tokens(tokens) + self.positions.weight[start:end]
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            q, k, v = layer["qkv"](layer["norm1"](x)).view(rows, num, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if cache is not None:  # keys and values of all tokens so far, [2, rows, heads, positions, width / heads]
                cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
                k, v = cache[:, :, :, :end]
            mixed = scaled_dot_product_attention(q, k, v, is_causal=num > 1)
            x = x + layer["out"](mixed.transpose(1, 2).reshape(rows, num, -1))
            x = x + layer["down"](gelu(layer["up"](layer["norm2"](x))))
        return self.head(self.norm(x)).log_softmax(-1)

    def log_probs(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return log-probs of all response tokens, flat, row by row. Rows sorted by length need less padding."""
        found = []
        for p, r in zip(prompts.chunk(4), responses.chunk(4), strict=True):
            mask = token_mask(r)
            r = r[:, : int(mask.sum(1).max())]
            of_all = self(torch.cat([self.num_actions + p, r[:, :-1]], 1))[:, self.prompt_tokens - 1 :]
            found.append(of_all.gather(2, r[:, :, None]).squeeze(2)[mask[:, : r.shape[1]]])
        return torch.cat(found)


@torch.no_grad()
def sample(policy: Policy, prompts: torch.Tensor, task: Walk, samples: int = 1, generator=None):
    """Return responses to prompts [rows, tokens] with log-probs and entropy, [rows, max_tokens], and rewards [rows]."""
    prompts = prompts.repeat_interleave(samples, 0)
    rows, (positions, width) = len(prompts), policy.positions.weight.shape
    caches = [torch.empty(2, rows, policy.heads, positions, width // policy.heads) for _ in policy.layers]
    responses, (behavior, entropy) = torch.full((rows, task.max_tokens), END), torch.zeros(2, rows, task.max_tokens)
    alive, done = torch.arange(rows), torch.zeros(rows, dtype=torch.bool)
    log_probs = policy(policy.num_actions + prompts, caches)[:, -1]
    for step in range(task.max_tokens):
        token = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
        responses[alive, step] = token
        behavior[alive, step] = log_probs.gather(1, token[:, None]).squeeze(1)
        entropy[alive, step] = -(log_probs.exp() * log_probs).sum(1)
        done |= token == END
        if done.all() or step + 1 == task.max_tokens:
            break
        if done.sum() > 0.2 * len(done):
            kept = (~done).nonzero().squeeze(1)
            alive, token, done = alive[kept], token[kept], done[kept]
            caches = [c.index_select(1, kept) for c in caches]  # a third of the time of c[:, kept]
        log_probs = policy(token[:, None], caches, policy.prompt_tokens + step)[:, 0]
    responses = torch.where(token_mask(responses), responses, END)
    found = {"prompts": prompts, "responses": responses, "rewards": task.reward(prompts, responses)}
    return SimpleNamespace(**found, log_probs=behavior, entropy=entropy)


def optimize(policy: Policy, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """Do one optimizer step; return the gradient norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return norm


def start_policy(run: Run, task: Walk) -> Policy:
    """Return the start policy of a task and seed: fine-tuned once until some responses are right, then kept on disk.

    It is made in float64. In float32 the rounding of another kind of processor would grow into another policy.
    """
    file = Path(run.starts, f"{run.task}-seed{run.seed}.pt")
    if not file.exists():
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(run.seed)
            policy, prompts = Policy(task), split_prompts(task)[0]
            optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0, fused=True)
            for _ in range(task.finetune_steps):
                chosen = prompts[torch.randint(len(prompts), (256,))]
                responses = task.demonstrate(chosen)
                order = token_mask(responses).sum(1).argsort()
                optimize(policy, optimizer, -policy.log_probs(chosen[order], responses[order]).mean())
        finally:
            torch.set_default_dtype(torch.float32)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(policy.float().state_dict(), file)
    policy = Policy(task)
    policy.load_state_dict(torch.load(file))
    return policy


def fixed_bounds(clip: str) -> tuple[float, ...] | None:
    """Return the (lower, upper) of a name in FIXED_BOUNDS or of LOWER:UPPER, None for anything else."""
    if clip in FIXED_BOUNDS or "=" in clip or ".py:" in clip or ":" not in clip:
        return FIXED_BOUNDS.get(clip)
    return tuple(map(float, clip.split(":")))


def clip_rule(run: Run) -> ClipRule:
    """Return the rule that chooses this run's clip bounds or weights."""
    if bounds := fixed_bounds(run.clip):
        return FixedBounds(*bounds)
    name, _, settings = run.clip.partition(":")
    if name == "a3po":
        return a3po(run.lag)
    if name.endswith(".py"):
        class_name, _, settings = settings.partition(":")
        name = f"{name}:{class_name}"
    if name in RULES | RIVALS or ".py:" in name:
        pairs = [setting.split("=") for setting in settings.split(",") if setting]
        rule = RIVALS.get(name) or rule_class(name)
        return rule(**{key: value if value.isalpha() else float(value) for key, value in pairs})
    smoothing = SmoothingConfig(run.half_life, run.smoothing_of) if run.half_life else None
    given = {"contribution": run.contribution, "positive_contribution_target": run.target, "smoothing": smoothing}
    given = {name: value for name, value in given.items() if value}
    return make_clip_rule(replace(ClipConfig.preset(run.clip), **given))


def correction(
    start_log_probs: torch.Tensor,
    behavior_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    run: Run,
) -> torch.Tensor:
    """Return each token's weight in the loss, from the ratio of the policy before training to the behavior policy."""
    if run.correction.startswith("taper"):
        level = "sequence" if run.correction == "taper_sequence" else "token"
        return tapered_weights(start_log_probs - behavior_log_probs, advantages, mask, level)
    ratio = importance_ratio(start_log_probs, behavior_log_probs)
    if run.correction == "mask":  # OpenRLHF's default
        return ratio * ((ratio >= 0.5) & (ratio <= 5.0))
    return ratio.clamp(max=2.0) if run.correction == "clip" else torch.ones_like(ratio)


def train_on(policy, optimizer, rollout, rows: torch.Tensor, rule: ClipRule, run: Run) -> dict:
    """Do one update on some rows of a rollout; return its metrics."""
    rows = rows[token_mask(rollout.responses[rows]).sum(1).argsort()]
    mask = token_mask(rollout.responses[rows])
    mask = mask[:, : int(mask.sum(1).max())]
    flat = policy.log_probs(rollout.prompts[rows], rollout.responses[rows])
    log_probs = torch.zeros(mask.shape).masked_scatter(mask, flat)  # [rows, tokens], like all tensors below
    advantages = rollout.advantages[rows][:, None].expand_as(log_probs)
    behavior_log_probs, weight = rollout.log_probs[rows, : mask.shape[1]], mask.float()
    base = behavior_log_probs
    if run.base == "start":
        base = rollout.start[rows, : mask.shape[1]]
        weight = weight * correction(base, behavior_log_probs, advantages, mask, run)

    tokens = Tokens(log_probs.detach(), base, advantages, weight)
    probs = behavior_log_probs.exp()
    rule.tally(replace(tokens, weight=weight * probs) if run.token_weight == "rollout_prob" else tokens)
    update = rule.close_update() if rule.needs_tally_first or run.same_update else None
    if (weights := rule.weights(tokens)) is not None:
        surrogate, (lower, upper) = weights * advantages, (torch.tensor(nan),) * 2
        gain = surrogate * log_probs
    else:
        ratio, (lower, upper) = importance_ratio(log_probs, base), rule.bounds(tokens)
        gain = torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
        if run.dual_clip:  # limits the loss of a negative token with a large ratio (arXiv 1912.09729)
            gain = torch.where(advantages < 0, torch.maximum(gain, run.dual_clip * advantages), gain)
        surrogate = gain.detach()
    gradient, entropy_rule = rule.gradient_weights(tokens), EntropyRule()
    entropy_rule.tally(rule, tokens, run.dual_clip or None)
    entropy_rule.close_update()
    update = update or rule.close_update()  # its bounds were known before its forward pass

    r = importance_ratio(log_probs.detach(), behavior_log_probs)[mask]
    if run.step == "vcpo":
        of_responses = ((log_probs.detach() - behavior_log_probs) * mask).sum(1).exp()
        optimizer.param_groups[0]["lr"] = run.lr * float(effective_sample_size(of_responses).sqrt())
    norm = optimize(policy, optimizer, -(weight * gain).sum() / mask.sum())

    found, is_one_pair = update.found or update.used, lower.dim() == 0
    metrics = (
        {"lower": lower, "upper": upper} if is_one_pair else {"lower": lower[mask].mean(), "upper": upper[mask].mean()}
    )
    metrics |= {"found_lower": found.lower, "found_upper": found.upper}
    shares = ("share_unclipped", tokens.ratio), ("share", gradient)
    metrics |= {name: positive_share(weight * factor, advantages) for name, factor in shares}
    eq8 = weight * probs * surrogate  # the terms of the paper's Eq. 8
    metrics |= {"eq8_positive": eq8[advantages > 0].sum() / mask.sum()}
    metrics |= {"eq8_negative": -eq8[advantages < 0].sum() / mask.sum()}
    sides = ("clip_positive", advantages > 0), ("clip_negative", advantages < 0)
    metrics |= {name: (gradient[side & mask] == 0).float().mean() for name, side in sides}
    metrics |= {name: torch.tensor(value) for name, value in entropy_rule.take_metrics().items()}
    return metrics | {"ess": effective_sample_size(r), "ratio_max": r.max(), "grad_norm": norm}


def effective_sample_size(ratio: torch.Tensor) -> torch.Tensor:
    """Return the effective sample size of importance ratios as a fraction of their number."""
    return ratio.sum() ** 2 / (len(ratio) * (ratio * ratio).sum())


def positive_share(weights: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the share of positive tokens in the sum of w |A|."""
    size = (weights * advantages.abs()).double()
    return size[advantages > 0].sum() / size.sum()


def select_wrong(rollout, share: float, samples: int):
    """Return half of each prompt's responses, and of those as many wrong ones as `share` says, if there are so many."""
    order = rollout.rewards.view(-1, 2 * samples).argsort(dim=1, stable=True)  # wrong ones first
    num_wrong = (rollout.rewards.view(-1, 2 * samples) == 0).sum(1, keepdim=True)
    first = (num_wrong - round(share * samples)).clamp(0, samples)  # drops the wrong ones beyond
    chosen = order.gather(1, first + torch.arange(samples))
    return take(rollout, (chosen + torch.arange(len(order))[:, None] * 2 * samples).flatten())


def take(rollout, rows: torch.Tensor):
    """Return some rows of a rollout."""
    return SimpleNamespace(**{name: values[rows] for name, values in vars(rollout).items()})


def joined(rollouts: list):
    """Return rollouts as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    return SimpleNamespace(**{name: torch.cat([getattr(r, name) for r in rollouts]) for name in vars(rollouts[0])})


def due(made: list, number: int, run: Run, order: torch.Generator) -> list:
    """Return what is trained on after rollout `number`, from all rollouts so far. `order` draws what is replayed."""
    if run.mixed:  # prompt p of each rollout waits for p % (lag + 1) rollouts
        waits = torch.arange(run.prompts).repeat_interleave(run.samples) % (run.lag + 1)
        parts = [take(made[number - wait], waits == wait) for wait in range(run.lag + 1) if number >= wait]
    else:
        parts = [made[number - run.lag]] if number >= run.lag else []
    if run.replay and parts and number > run.lag:
        past = joined(made[max(0, number - run.lag - run.replay) : number - run.lag])
        groups = torch.randperm(len(past.rewards) // run.samples, generator=order)[: run.prompts]
        parts.append(take(past, (groups[:, None] * run.samples + torch.arange(run.samples)).flatten()))
    return parts


def train(run: Run) -> list[dict[str, float]]:
    """Train; return one row of metrics per rollout. Update metrics are means over the updates after that rollout.

    A run whose weights are no longer finite has broken off: from then on its reward and accuracy are 0.
    """
    task, rule, (prompts, heldout) = TASKS[run.task], clip_rule(run), split_prompts(TASKS[run.task])
    policy, made, table = start_policy(run, task), [], []
    optimizer = torch.optim.AdamW(policy.parameters(), run.lr, betas=(0.9, 0.95), weight_decay=0, fused=True)
    torch.manual_seed(run.seed)
    # Every method of a seed has the same prompts in the same order, whatever it draws for its responses.
    order, evaluation = (torch.Generator().manual_seed(run.seed) for _ in range(2))
    changed_at, _, change = run.then.partition(":")
    checkpoints, fifth = evenly_spaced(run.rollouts), run.rollouts // 5
    for number in range(run.rollouts):
        if str(number) == changed_at:
            name, _, value = change.partition("=")
            run = replace(run, **{name: type(getattr(run, name))(value)})
            optimizer.param_groups[0]["lr"] = run.lr
        in_last_fifth, is_last = number >= run.rollouts - fifth, number + 1 == run.rollouts
        if not is_finite(policy):
            ends = ("pass1", "pass16") if is_last else ()
            table.append(dict.fromkeys(table[-1], nan) | dict.fromkeys(("reward", "heldout", *ends), 0.0))
            table[-1]["rollout"] = number
            continue
        chosen = prompts[torch.randint(len(prompts), (run.prompts,), generator=order)]
        rollout = sample(policy, chosen, task, run.samples * (2 if run.wrong else 1))
        row = {"rollout": number, "reward": rollout.rewards.mean()}
        row["entropy"] = rollout.entropy[token_mask(rollout.responses)].mean()
        if run.wrong:
            rollout = select_wrong(rollout, run.wrong, run.samples)
        groups, mask = rollout.rewards.view(-1, run.samples), token_mask(rollout.responses)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-9)).flatten()
        rollout.advantages = advantages
        made.append(rollout)
        length, positive = mask.sum(1).double(), advantages > 0
        row |= {"length_positive": length[positive].mean(), "length_negative": length[advantages < 0].mean()}
        row["share_on_policy"] = (advantages * length)[positive].sum() / (advantages.abs() * length).sum()
        if parts := due(made, number, run, order):  # the last `lag` rollouts of a run are never trained on
            stale = joined(parts)
            if run.base == "start":
                stale = SimpleNamespace(**vars(stale), start=start_log_probs(policy, stale))
            orders = [torch.randperm(len(stale.rewards), generator=order) for _ in range(run.epochs)]
            chunks = [part for rows in orders for part in rows.chunk(run.updates)]
            updates = [train_on(policy, optimizer, stale, part, rule, run) for part in chunks]
            row |= {name: torch.stack([u[name] for u in updates]).double().nanmean() for name in updates[0]}
        if number in checkpoints or in_last_fifth:
            samples = 16 if is_last else ENDPOINT_SAMPLES // fifth if in_last_fifth else 2
            right = torch.zeros(len(heldout), samples)
            if is_finite(policy):
                right = sample(policy, heldout, task, samples, generator=evaluation).rewards.view(-1, samples)
            row["heldout"] = right.mean()
            if is_last:
                row |= {"pass1": right.mean(), "pass16": right.amax(1).mean()}
        table.append({name: float(value) for name, value in row.items()})
        if number % 5 == 0 or number + 1 == run.rollouts:
            print(" ".join(f"{name} {value:.3g}" for name, value in table[-1].items()), flush=True)
    return table


def is_finite(policy: Policy) -> bool:
    """Return whether every weight is a finite number."""
    return all(bool(parameter.isfinite().all()) for parameter in policy.parameters())


def evenly_spaced(rollouts: int) -> list[int]:
    """Return the rollouts after which a run of this length has its evenly spaced evaluations."""
    return [round(rollouts * k / CHECKPOINTS) - 1 for k in range(1, CHECKPOINTS + 1)]


@torch.no_grad()
def start_log_probs(policy: Policy, rollout) -> torch.Tensor:
    """Return the log-probs of a rollout's tokens under the policy as it is now, [rows, max_tokens], 0 after END."""
    mask = token_mask(rollout.responses)
    order = mask.sum(1).argsort()
    found = torch.zeros(mask.shape)
    found[order] = found[order].masked_scatter(
        mask[order], policy.log_probs(rollout.prompts[order], rollout.responses[order])
    )
    return found


def main(train=train, description: str = __doc__) -> None:
    """Parse a Run's fields as flags, train, and write the table if --out is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Run):
        kind = {"action": "store_true"} if field.type is bool else {"type": field.type, "default": field.default}
        parser.add_argument(f"--{field.name}", **kind)
    run = Run(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    table = train(run)
    if run.out:
        with open(run.out, "w") as file:
            file.write(",".join(table[-1]) + "\n")
            file.writelines(",".join(f"{row.get(name, nan):.4g}" for name in table[-1]) + "\n" for row in table)


if __name__ == "__main__":
    main()
