"""walk.py with three more tasks and the same flags: `other_tasks.py --task jugs`.

* `jugs`: reasoning-gym's water jugs, with its score. A prompt is three capacities and an amount. A response fills,
  empties and pours jugs. It is right if it ends and a jug then holds the amount. Wrong responses are longer than right
  ones, as in the walk and in the paper (Figure 6).
* `sums`: two-digit additions. A response is the digits of the sum. Right and wrong responses have equal length.
* `detour`: a walk around a block of 3 x 3 cells, which half of the straight walks run into. The start policy learned
  from walks that ignore the block, mostly straight ones. So its entropy is low, and it hardly ever gets around a block.
  A run sees 1,920 of 205,440 prompts.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from walk import END, MOVES, TASKS, Walk, main, token_mask

NUM_JUGS = 3
FILL, EMPTY, POUR = 0, 1, 2
ACTIONS = [(kind, jug, None) for kind in (FILL, EMPTY) for jug in range(NUM_JUGS)]
ACTIONS += [(POUR, jug, into) for jug in range(NUM_JUGS) for into in range(NUM_JUGS) if into != jug]
ACTIONS.insert(END, None)


def after_each(capacities: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return the jugs' contents after each action, [..., actions, 3], from their contents `held`, [..., 3]."""
    states = []
    for action in ACTIONS:
        state = held.clone()
        if action:
            kind, jug, into = action
            if kind == POUR:
                amount = torch.minimum(held[..., jug], (capacities - held)[..., into])
                state[..., jug] -= amount
                state[..., into] += amount
            else:
                state[..., jug] = capacities[..., jug] if kind == FILL else 0
        states.append(state)
    return torch.stack(states, -2)


@dataclass(frozen=True)
class Jugs:
    """Three jugs of 3 to `num_values` - 1 liters; measure an amount below the largest, in at least two moves."""

    num_values: int  # values of a prompt token
    max_tokens: int  # maximum response length
    random_moves: float  # share of random moves in the demonstrations
    finetune_steps: int
    num_actions: int = len(ACTIONS)
    prompt_tokens: int = 4

    def prompts(self) -> torch.Tensor:
        """Return every solvable puzzle: capacities and amount, [num, 4]."""
        capacities = torch.cartesian_prod(*[torch.arange(3, self.num_values)] * NUM_JUGS)
        amounts = torch.arange(1, self.num_values)
        prompts = torch.cat(
            [capacities.repeat_interleave(len(amounts), 0), amounts.repeat(len(capacities))[:, None]], 1
        )
        divisor = torch.gcd(torch.gcd(prompts[:, 0], prompts[:, 1]), prompts[:, 2])
        largest, amount = prompts[:, :3].amax(1), prompts[:, 3]
        return prompts[(amount % divisor == 0) & (amount < largest) & (prompts[:, :3] != amount[:, None]).all(1)]

    def reward(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return 1 for a response that ends with the amount in a jug, else 0. Padding after END is END."""
        capacities, held = prompts[:, :3], torch.zeros(len(prompts), NUM_JUGS, dtype=torch.long)
        for action in responses.T:
            held = after_each(capacities, held)[torch.arange(len(held)), action]
        return ((held == prompts[:, 3:]).any(1) & (responses[:, -1] == END)).float()

    @cached_property
    def moves_left(self) -> torch.Tensor:
        """The fewest moves to the amount from every state: [capacity (3 axes), amount, held (3 axes)]."""
        size = self.num_values
        capacities = torch.cartesian_prod(*[torch.arange(size)] * NUM_JUGS)[:, None]  # [size ** 3, 1, 3]
        held = torch.cartesian_prod(*[torch.arange(size)] * NUM_JUGS)[None]
        following = after_each(capacities.expand(-1, held.shape[1], -1), held.minimum(capacities))
        following = (following * torch.tensor([size * size, size, 1])).sum(-1)  # [capacities, states, actions]
        moves = torch.where((held == torch.arange(size)[:, None, None]).any(-1), 0, 99).to(torch.int8)
        moves = moves.repeat(len(capacities), 1, 1)  # [capacities, amounts, states]
        index = following.flatten(1)[:, None]
        while True:
            after = moves.gather(2, index.expand(-1, size, -1)).view(*moves.shape, len(ACTIONS)).amin(3) + 1
            if torch.equal(fewer := torch.minimum(moves, after), moves):
                return moves.view([size] * 7)
            moves = fewer

    def demonstrate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return responses that take shortest ways, except for a share of `random_moves`, and end at the amount."""
        held = torch.zeros(len(prompts), NUM_JUGS, dtype=torch.long)
        responses = torch.empty(len(prompts), self.max_tokens, dtype=torch.long)

        def moves_left(*held: torch.Tensor) -> torch.Tensor:
            return self.moves_left[(*prompts.T, *held)]

        for step in range(self.max_tokens):
            states = after_each(prompts[:, :3], held)  # [rows, actions, 3]
            now, left = moves_left(*held.T), moves_left(*states.permute(2, 1, 0)).T  # [rows], [rows, actions]
            nearer = left < now[:, None]
            nearer[:, END] = now == 0
            changes = (states != held[:, None]).any(2)
            strays = (torch.rand(len(prompts)) < self.random_moves)[:, None] & (now > 0)[:, None]
            responses[:, step] = torch.multinomial(torch.where(strays, changes, nearer).float(), 1).squeeze(1)
            held = states[torch.arange(len(held)), responses[:, step]]
        return torch.where(token_mask(responses), responses, END)


@dataclass(frozen=True)
class Sums:
    """Additions of two numbers from 10 to 99; a response is the digits of the sum, most significant first."""

    finetune_steps: int
    max_tokens: int = 4
    num_values: int = 10
    num_actions: int = 11
    prompt_tokens: int = 4

    def prompts(self) -> torch.Tensor:
        """Return every pair of numbers as four digits, [num, 4]."""
        prompts = torch.cartesian_prod(*[torch.arange(10)] * 4)
        return prompts[(prompts[:, 0] > 0) & (prompts[:, 2] > 0)]

    def demonstrate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return the right responses."""
        total = prompts[:, 0] * 10 + prompts[:, 1] + prompts[:, 2] * 10 + prompts[:, 3]
        digits = torch.stack([total // 100, total // 10 % 10, total % 10], 1)
        digits += digits >= END  # digits from END on are shifted by one to make room for it
        shifted = torch.cat([digits[:, 1:], torch.full((len(digits), 1), END)], 1)
        responses = torch.where(total[:, None] > 99, digits, shifted)
        return torch.cat([responses, torch.full((len(digits), 1), END)], 1)

    def reward(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return 1 for the digits of the sum followed by END, else 0."""
        return (responses == self.demonstrate(prompts)).all(1).float()


@dataclass(frozen=True)
class Detour(Walk):
    """The walk with a block of 3 x 3 cells, which a right walk never enters. A prompt ends with the block's center."""

    straight: float = 0.9
    prompt_tokens: int = 6

    def prompts(self) -> torch.Tensor:
        """Return prompts whose start and goal are outside the block, [num, 6].

        They are all whose straight way is blocked, and as many others.
        """
        prompts = super().prompts()
        prompts = prompts[~is_blocked(prompts, prompts[:, :4].view(-1, 2, 2)).any(1)]
        blocked = is_straight_blocked(prompts)
        free = prompts[~blocked]
        kept = torch.randperm(len(free), generator=torch.Generator().manual_seed(0))[: int(blocked.sum())]
        return torch.cat([prompts[blocked], free[kept]])

    def reward(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return 1 for a right walk that never enters the block, else 0."""
        path = prompts[:, None, :2] + MOVES[responses].cumsum(1)
        return super().reward(prompts, responses) * ~is_blocked(prompts, path).any(1)


def is_blocked(prompts: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Return which of each prompt's cells, [rows, num, 2], lie in its block, [rows, num]."""
    return ((cells - prompts[:, None, 4:]).abs() <= 1).all(2)


def is_straight_blocked(prompts: torch.Tensor) -> torch.Tensor:
    """Return whether the block lies on the way along the start's column and the goal's row, [rows]."""
    (row, column), (goal_row, goal_column), block = prompts[:, :2].T, prompts[:, 2:4].T, prompts[:, 4:]

    def meets(at: torch.Tensor, first: torch.Tensor, last: torch.Tensor, across: int) -> torch.Tensor:
        low, high, along = torch.minimum(first, last), torch.maximum(first, last), block[:, 1 - across]
        return ((at - block[:, across]).abs() <= 1) & (low <= along + 1) & (high >= along - 1)

    return meets(column, row, goal_row, 1) | meets(goal_row, column, goal_column, 0)


TASKS["jugs"] = Jugs(num_values=9, max_tokens=20, random_moves=0.2, finetune_steps=500)
TASKS["sums"] = Sums(finetune_steps=120)
TASKS["detour"] = Detour(10, 40, random_moves=0.1, finetune_steps=200)

if __name__ == "__main__":
    main(description=__doc__)
