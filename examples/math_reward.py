"""Rewards right final answers to mathematical questions, with --reward.remote_url examples/math_reward.py.

To change the reward, wrap the function; OpenRLHF takes any `reward_func` that it finds in this file. For example, to
punish responses without a box:

    from openrlhf_bapo.math_tasks import reward as math_reward

    def reward_func(queries, prompts, labels, **kwargs):
        result = math_reward.reward_func(queries, prompts, labels, **kwargs)
        unboxed = torch.tensor(["\\boxed" not in query.removeprefix(prompt) for query, prompt in zip(queries, prompts)])
        return result | {"rewards": result["rewards"] - 0.1 * unboxed}

`rewards` are what is trained on, `scores` what dynamic filtering goes by. To change the limits:

    math_reward.GRADER = MathGrader(num_workers=8, time_limit=10.0)  # from openrlhf_bapo.math_tasks.grader
"""

from openrlhf_bapo.math_tasks.reward import reward_func  # noqa: F401
