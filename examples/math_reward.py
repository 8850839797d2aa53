"""Rewards right final answers to mathematical questions: --reward.remote_url examples/math_reward.py.

OpenRLHF calls the `reward_func` of this file. To change the reward, wrap the function. For example, to penalize
responses without a box:

    from openrlhf_bapo.math_tasks import reward as math_reward

    def reward_func(queries, prompts, labels, **kwargs):
        result = math_reward.reward_func(queries, prompts, labels, **kwargs)
        unboxed = torch.tensor(["\\boxed" not in query.removeprefix(prompt) for query, prompt in zip(queries, prompts)])
        return result | {"rewards": result["rewards"] - 0.1 * unboxed}

Training uses `rewards`, dynamic filtering uses `scores`. To change the limits:

    math_reward.GRADER = MathGrader(num_workers=8, time_limit=10.0)  # from openrlhf_bapo.math_tasks.grader
"""

from openrlhf_bapo.math_tasks.reward import reward_func  # noqa: F401
