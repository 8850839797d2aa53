"""BAPO in Molt, on its real trainer and FSDP2 on the CPU; run by test_molt.py in Molt's environment."""

import asyncio
import copy
import inspect
import math
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked process would wait for its parent's other threads

import pipeline
import presets
import pytest
import ray
import refusals
import torch
from molt.cli import train_rl_ray
from molt.models import PolicyLoss
from molt.models.loss import ppo_policy_loss
from molt.trainer import vllm  # noqa: F401  # which the command would import in every case
from molt.trainer.algorithm.advantage import AdvantageContext, get_advantage_estimator
from molt.trainer.algorithm.experience import Experience
from molt.trainer.workers import policy_actor
from molt.utils import get_strategy
from nemo_automodel import NeMoAutoModelForCausalLM  # noqa: F401  # likewise in every forked process
from ranks import on_ranks
from reference import expected_entropy, expected_step
from torch.distributed.fsdp import MixedPrecisionPolicy

import openrlhf_bapo.molt
from openrlhf_bapo import ClipConfig, find_clip_bounds
from openrlhf_bapo.molt import BapoPolicyLoss, BapoPolicyModelActor
from openrlhf_bapo.rules.clip_bounds import tally_contributions
from openrlhf_bapo.rules.clip_config import SmoothingConfig
from openrlhf_bapo.rules.clip_rules import FixedBounds, SteadyBounds
from openrlhf_bapo.rules.other_rules import as_clip_rule

NUM_SAMPLES, NUM_ROLLOUTS, NUM_STEPS = 16, 2, 2  # steps per rollout
PROMPT, RESPONSE = 6, 10
SEARCH = ["--bapo.contribution", "gradient", "--bapo.positive_contribution_target", "0.35"]
CONFIG = ClipConfig(contribution="gradient", positive_contribution_target=0.35)


def flags(directory) -> list[str]:
    """Molt's flags for the tiny model."""
    given = {
        "actor.model_name_or_path": directory / "model",
        "actor.num_gpus_per_node": 1,
        "actor.adam.lr": 5e-3,
        "actor.lr_warmup_ratio": 0,
        "actor.gradient_checkpoint": "none",
        "fsdp.attn_implementation": "sdpa",
        "data.prompt_dataset": directory / "train.jsonl",
        "train.agent_path": directory / "agent.py",
        "train.batch_size": NUM_SAMPLES // NUM_STEPS,
        "train.micro_batch_size": 2,
        "rollout.batch_size": NUM_SAMPLES,
        "vllm.num_engines": 1,
        "vllm.sync_backend": "gloo",
        "ckpt.path": directory / "checkpoints",
    }
    return [str(part) for name, value in given.items() for part in (f"--{name}", value)]


ACTORS: list = []
"""The actor that Molt's command would start, by call of `parse`."""


class Parsed(Exception):
    """Ends Molt's command when it has parsed its flags."""


def parse(argv: list[str]):
    """Return Molt's arguments, as its command makes them of the flags."""

    def stop(args):
        ACTORS.append(policy_actor.PolicyModelActor)
        raise Parsed(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["molt", *argv])
        patch.setattr(ray, "init", lambda **_: None)
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr("molt.utils.get_strategy", stop)
        patch.setattr(policy_actor, "PolicyModelActor", policy_actor.PolicyModelActor)  # is put back
        with pytest.raises(Parsed) as parsed:
            openrlhf_bapo.molt.main()
    return parsed.value.args[0]


def refusal(argv: list[str], capsys) -> str:
    """Return the one line with which Molt's command refuses the flags."""
    with pytest.raises(SystemExit) as exit_:
        parse(argv)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1, error
    return error


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("molt"))


@pytest.fixture(scope="module")
def samples(directory) -> list[dict[str, torch.Tensor]]:
    """Responses of 1 to 10 tokens, whose engine was close to the model; each tensor without padding."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(NUM_SAMPLES):
        length = int(torch.randint(1, RESPONSE + 1, (1,), generator=generator))
        sequence = torch.randint(3, 16, (1, PROMPT + length), generator=generator)
        mask = torch.arange(PROMPT + length - 1)[None] >= PROMPT - 1
        advantages = torch.randn(1, 1, generator=generator) * mask
        noise = 0.4 * torch.randn(mask.shape, generator=generator) * mask
        found.append(dict(sequences=sequence, mask=mask, advantages=advantages, noise=noise))
    start = pipeline.load_model(directory)
    for sample in found:
        sample["rollout_log_probs"] = log_probs(start, sample) + sample.pop("noise")
    return found


@torch.no_grad()
def log_probs(model, sample) -> torch.Tensor:
    """Return the log-probs of a sample's tokens by transformers alone, [1, tokens]; 0 for the prompt's."""
    found = model(sample["sequences"]).logits[:, :-1].log_softmax(-1)
    return found.gather(2, sample["sequences"][:, 1:, None])[..., 0] * sample["mask"]


def tokens_of(directory, samples, weights) -> tuple[torch.Tensor, ...]:
    """Ratio, advantages and mask of samples under a policy, [tokens]."""
    model = pipeline.load_model(directory, weights)
    parts = [((log_probs(model, x) - x["rollout_log_probs"]).exp(), x["advantages"], x["mask"].long()) for x in samples]
    return tuple(torch.cat([part[0] for part in column]) for column in zip(*parts, strict=True))


def experience(index, sample, action_log_probs, std: float | None = None) -> Experience:
    """What Molt's generator and experience maker make of a sample; its reward is its index.

    `std` is the deviation of its group's rewards.
    """
    lengths = sample["mask"].sum(1)
    return Experience(
        sequences=sample["sequences"],
        attention_mask=torch.ones_like(sample["sequences"]),
        action_mask=sample["mask"],
        action_log_probs=action_log_probs,
        rollout_log_probs=sample["rollout_log_probs"].clone(),
        advantages=sample["advantages"].clone(),
        rewards=torch.tensor([float(index)]),
        response_length=lengths.float(),
        total_length=torch.tensor([float(sample["sequences"].size(1))]),
        index=[0],
        info={} if std is None else {"group_reward_std": torch.tensor([std])},
    )


def train(rank, args, directory, samples, first=0, num_rollouts=NUM_ROLLOUTS, save=False, stds=None):
    """Train on the samples again and again: for each optimizer step (weights before it, indices of its samples).

    Returns these, the status of each rollout, the number of forward passes, and the last weights.
    """
    torch.use_deterministic_algorithms(True)
    args = copy.deepcopy(args)
    args.fsdp.param_dtype = "fp32"
    strategy = get_strategy(args)
    setup = strategy.setup_distributed

    def setup_in_fp32():
        setup()
        strategy.distributed_config.mp_policy = MixedPrecisionPolicy(torch.float32, torch.float32)

    strategy.setup_distributed = setup_in_fp32
    world_size = torch.distributed.get_world_size()
    actor = BapoPolicyModelActor(world_size, rank, "127.0.0.1", int(os.environ["MASTER_PORT"]))
    actor.init_model_from_pretrained(strategy, str(directory / "model"), max_steps=1000)
    trainer, steps, statuses, num_forwards = actor.trainer, [], [], []
    actor.actor.register_forward_hook(lambda *_: num_forwards.append(1))
    collate = trainer.replay_buffer.collate_fn

    def weights():
        state = actor.actor.model.state_dict()
        return {name: getattr(x, "full_tensor", lambda x=x: x)().clone() for name, x in state.items()}

    def noted(batch):
        seen.append([int(item.rewards) for item in batch])
        return collate(batch)

    trainer.replay_buffer.collate_fn = noted
    step = trainer.strategy.optimizer_step

    def optimizer_step(*given, **kwargs):
        steps.append((before[-1], seen.copy()))
        seen.clear()
        step(*given, **kwargs)
        before.append(weights())

    trainer.strategy.optimizer_step = optimizer_step
    seen, before = [], [weights()]
    for number in range(first, num_rollouts):
        here = range(rank, NUM_SAMPLES, world_size)
        model = pipeline.load_model(directory, before[-1])
        for index in here:
            std = None if stds is None else stds[index % len(stds)]
            actor.append(experience(index, samples[index], log_probs(model, samples[index]), std))
        num_forwards.clear()
        statuses.append(actor.fit(0.0) | {"num_forwards": len(num_forwards)})
        if save:
            actor.save_checkpoint(f"global_step{number + 1}", {"global_step": number + 1})
    return steps, statuses, before[-1]


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_rule_has_the_plain_loops_bounds_and_gradient(name):
    rule = as_clip_rule(name)
    correction = dict(is_correction_level="token", is_correction_threshold=[0.0, math.inf])  # as the command sets it
    loss = BapoPolicyLoss(PolicyLoss(dual_clip=rule.config.dual_clip, **correction), rule)
    found = []
    for update in presets.make_updates():
        if rule.needs_tally_first and rule.config.scope == "update":
            for part in update:
                loss.tally(part["log_probs"], part["old_log_probs"], part["advantages"], part["mask"].bool())
            loss.close_update()
        for part in update:
            given = part["log_probs"].clone().requires_grad_()
            mask, old = part["mask"].bool(), part["old_log_probs"]
            values = given, torch.zeros_like(given), part["advantages"], mask, old
            loss(*values, dp_size=1, batch_num_tokens=mask.sum())[0].backward()
            found.append((1 - loss.clip_eps_low, 1 + loss.clip_eps_high, given.grad))
        if not rule.needs_tally_first:
            loss.close_update()
    presets.assert_same(found, name)


@pytest.fixture(scope="module")
def searched(directory, samples):
    return on_ranks(2, train, parse([*flags(directory), "--policy_loss", "bapo", *SEARCH]), directory, samples)


def all_tokens(directory, samples, ranks, number):
    """The tokens of an optimizer step on all ranks, before it."""
    chosen = [index for steps, *_ in ranks for micro_batch in steps[number][1] for index in micro_batch]
    assert len(chosen) == len(set(chosen)) == NUM_SAMPLES // NUM_STEPS
    return tokens_of(directory, [samples[index] for index in chosen], ranks[0][0][number][0])


def assert_searches(directory, samples, ranks) -> None:
    """Whether the logged bounds of a run are those of a search on each of its optimizer steps."""
    for rollout in range(NUM_ROLLOUTS):
        steps = [all_tokens(directory, samples, ranks, NUM_STEPS * rollout + step) for step in range(NUM_STEPS)]
        expected = [find_clip_bounds(*tokens, CONFIG) for tokens in steps]
        ratios = torch.cat([ratio[mask > 0] for ratio, _, mask in steps])
        for _, statuses, _ in ranks:
            for name, field in dict(clip_low="lower", clip_high="upper", initial_share="initial_share").items():
                mean = sum(getattr(bounds, field).item() for bounds in expected) / NUM_STEPS
                assert statuses[rollout][f"bapo/{name}"] == pytest.approx(mean, abs=1e-5)
            assert statuses[rollout]["offpolicy/ratio_mean"] == pytest.approx(ratios.mean().item(), abs=1e-4)


def test_bounds_are_those_of_the_search_on_all_tokens_of_the_optimizer_step_on_all_ranks(directory, samples, searched):
    assert_searches(directory, samples, searched)
    for _, statuses, _ in searched:
        for status in statuses:
            # The first step of a rollout is searched on the log-probs that Molt has computed.
            num_micro_batches = NUM_SAMPLES // 2 // 2
            assert status["num_forwards"] == num_micro_batches + num_micro_batches // NUM_STEPS
            assert status["timing/bapo_search"] > 0 and status["timing/bapo_ratio_forward"] > 0


def test_micro_batches_that_make_no_whole_step_are_not_trained_and_not_searched(directory, samples):
    args = parse([*flags(directory), "--policy_loss", "bapo", *SEARCH])
    args.train.batch_size = 12
    ((steps, (status,), _),) = on_ranks(1, train, args, directory, samples, num_rollouts=1)
    ((weights, micro_batches),) = steps
    chosen = [samples[index] for micro_batch in micro_batches for index in micro_batch]
    assert len(chosen) == 12
    expected = find_clip_bounds(*tokens_of(directory, chosen, weights), CONFIG)
    assert status["bapo/initial_share"] == pytest.approx(expected.initial_share.item(), abs=1e-5)


def test_too_few_samples_for_an_optimizer_step_are_not_trained_and_their_rollout_has_no_metrics(directory, samples):
    args = parse([*flags(directory), "--policy_loss", "bapo", *SEARCH])
    args.train.batch_size = 2 * NUM_SAMPLES
    ((steps, statuses, _),) = on_ranks(1, train, args, directory, samples)
    assert steps == [] and len(statuses) == NUM_ROLLOUTS
    assert not [name for status in statuses for name in status if name.startswith(("bapo/", "offpolicy/", "entropy/"))]


def test_with_one_micro_batch_per_step_no_forward_is_made_for_the_rule(directory, samples):
    args = parse([*flags(directory), "--policy_loss", "bapo", *SEARCH, "--train.micro_batch_size", "4"])
    ranks = on_ranks(2, train, args, directory, samples)
    assert_searches(directory, samples, ranks)
    for _, statuses, _ in ranks:
        assert [each["num_forwards"] for each in statuses] == [NUM_STEPS] * NUM_ROLLOUTS


def assert_follows(steady, directory, samples, ranks) -> None:
    """Whether the logged bounds of a run are those of a rule that follows its optimizer steps."""
    for rollout, status in enumerate(ranks[0][1]):
        used = []
        for step in range(NUM_STEPS):
            used.append((steady.lower.item(), steady.upper.item()))
            steady.follow(
                tally_contributions(*all_tokens(directory, samples, ranks, NUM_STEPS * rollout + step), CONFIG)
            )
        lower, upper = (sum(column) / NUM_STEPS for column in zip(*used, strict=True))
        assert status["bapo/clip_low"] == pytest.approx(lower, abs=1e-6)
        assert status["bapo/clip_high"] == pytest.approx(upper, abs=1e-6)


OTHER_RULES = {
    ("--bapo.smoothing_of", "tally"): "'bounds', but this run has smoothing of 'tally'",
    ("--bapo.positive_contribution_target", "0.9"): "but this run has config ",
}


@pytest.fixture(scope="module")
def started(directory, samples, tmp_path_factory):
    """Flags of steady bounds, and a run of one rollout on two ranks that has saved a checkpoint."""
    checkpoints = str(tmp_path_factory.mktemp("checkpoints"))
    ours = [*flags(directory), "--policy_loss", "bapo", *SEARCH, "--bapo.smoothing", "2", "--ckpt.path", checkpoints]
    for given in OTHER_RULES:
        parse([*ours, *given, "--ckpt.load_enable"])  # there is no checkpoint yet
    return ours, on_ranks(2, train, parse(ours), directory, samples, num_rollouts=1, save=True)


def test_steady_bounds_follow_the_steps_before_and_need_no_forward_of_their_own(directory, samples, started):
    _, ranks = started
    assert_follows(SteadyBounds(CONFIG, SmoothingConfig(2.0)), directory, samples, ranks)
    assert ranks[0][1][0]["num_forwards"] == NUM_SAMPLES // 2 // 2


def test_a_resumed_actor_goes_on_with_the_state_of_a_rule_of_ones_own_in_its_checkpoint(directory, samples, tmp_path):
    own = ["--rule.half_life", "2", "--rule.contribution", "gradient", "--rule.target", "0.35"]
    ours = [*flags(directory), "--policy_loss", presets.MINE, *own, "--ckpt.path", str(tmp_path)]
    steady = SteadyBounds(CONFIG, SmoothingConfig(2.0))
    started = on_ranks(2, train, parse(ours), directory, samples, num_rollouts=1, save=True)
    resumed = on_ranks(2, train, parse([*ours, "--ckpt.load_enable"]), directory, samples, first=1)
    assert all(torch.equal(resumed[0][0][0][0][name], weight) for name, weight in started[0][2].items())
    assert_follows(steady, directory, samples, started)
    assert_follows(steady, directory, samples, resumed)


def test_a_checkpoint_of_another_rule_is_refused_in_one_line_before_ray_starts(directory, started, capsys):
    ours, _ = started
    parse([*ours, "--ckpt.load_enable", "--bapo.smoothing", "3"])  # the half-life may change
    parse([*flags(directory), "--policy_loss", "topr", "--ckpt.path", ours[-1], "--ckpt.load_enable"])
    capsys.readouterr()
    for given, said in OTHER_RULES.items():
        parse([*ours, *given])
        assert said in refusal([*ours, *given, "--ckpt.load_enable"], capsys)


def test_a_resume_of_the_weights_alone_starts_the_rule_again_whatever_rule_the_checkpoint_has(
    directory, samples, started, monkeypatch, capsys
):
    ours, ranks = started
    monkeypatch.setenv("LOAD_MODEL_ONLY", "1")
    capsys.readouterr()
    parse([*ours, "--bapo.smoothing_of", "tally", "--ckpt.load_enable"])
    assert capsys.readouterr().err == ""
    resumed = on_ranks(2, train, parse([*ours, "--ckpt.load_enable"]), directory, samples, first=1)
    assert all(torch.equal(resumed[0][0][0][0][name], weight) for name, weight in ranks[0][2].items())
    assert_follows(SteadyBounds(CONFIG, SmoothingConfig(2.0)), directory, samples, resumed)


def test_a_group_of_equal_rewards_trains_nothing(directory, samples):
    rewards = torch.tensor([0.7] * 8 + [10.1] * 8)
    groups = [list(range(8)), list(range(8, 16))]
    masks = [torch.ones(16, 1)]
    context = AdvantageContext(
        sample_to_rollout=torch.arange(16), exp_len=[16], action_masks=masks, kl_coef=0.0, gamma=1.0, lam=1.0, kls=masks
    )
    (advantages,), _ = get_advantage_estimator("grpo")(rewards, groups, context)
    assert advantages.abs().min() > 0.9  # rounding alone
    spreads = [rewards[group].std().item() for group in groups]
    argv = [*flags(directory), "--policy_loss", "bapo", *SEARCH, "--algo.advantage.estimator", "grpo"]
    argv += ["--rollout.n_samples_per_prompt", "2"]

    def moved(stds: list[float], *more: str) -> bool:
        ((steps, _, after),) = on_ranks(1, train, parse([*argv, *more]), directory, samples, num_rollouts=1, stds=stds)
        before = steps[0][0]
        return any(not torch.equal(before[name], weight) for name, weight in after.items())

    assert not moved(spreads) and moved([0.01])
    assert moved([0.0], "--algo.advantage.estimator", "reinforce")  # whose groups are of one


def test_a_rollout_that_is_one_step_is_searched_as_one(directory, samples):
    args = parse([*flags(directory), "--policy_loss", "bapo", *SEARCH, "--train.force_on_policy"])
    ranks = on_ranks(2, train, args, directory, samples, num_rollouts=1)
    (weights, _), *others = ranks[0][0]
    assert not others
    ratio, *others = tokens_of(directory, samples, weights)
    bounds, expected = expected_step(ratio, *others, CONFIG)
    expected |= expected_entropy(ratio, torch.cat([x["rollout_log_probs"][0] for x in samples]), *others, bounds)
    status = ranks[0][1][0]
    logged = {name: value for name, value in status.items() if name.startswith(("entropy/", "offpolicy/"))}
    assert logged | {name: status[name] for name in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("loss_agg_mode", openrlhf_bapo.molt.MEAN_OVER)
def test_the_share_is_one_of_the_gradient_in_every_aggregation(loss_agg_mode):
    loss = BapoPolicyLoss(PolicyLoss(loss_agg_mode=loss_agg_mode), as_clip_rule(CONFIG))
    (tokens, *_) = presets.make_updates()[0]
    given, mask = tokens["log_probs"].clone().requires_grad_(), tokens["mask"].bool()
    loss.tally(given, tokens["old_log_probs"], tokens["advantages"], mask)
    loss.close_update()
    loss(given, torch.zeros_like(given), tokens["advantages"], mask, tokens["old_log_probs"])[0].backward()
    size = given.grad.abs()
    expected = size[tokens["advantages"] > 0].sum() / size.sum()
    assert loss.updates[0].used.positive_share.item() == pytest.approx(expected.item(), abs=1e-5)


def test_ppos_bounds_are_molts_own(directory, samples):
    args = parse([*flags(directory), "--policy_loss", "ppo", "--actor.eps_clip_low_high", "0.1", "0.3"])
    ((_, statuses, _),) = on_ranks(1, train, args, directory, samples, num_rollouts=1)
    assert statuses[0]["bapo/clip_low"] == pytest.approx(0.9) and statuses[0]["bapo/clip_high"] == pytest.approx(1.3)
    assert "timing/bapo_search" not in statuses[0]


def test_ppo_is_molts_loss_against_the_engines_log_probs(directory):
    (update, *_), mean = presets.make_updates()[0], dict(dp_size=1)
    rule = FixedBounds(0.8, 1.3)
    values = update["advantages"], update["mask"].bool(), update["old_log_probs"]
    found = []
    for loss, denominators in (
        (BapoPolicyLoss(PolicyLoss(), rule), torch.zeros(8, 12)),
        (PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.3), update["old_log_probs"]),
    ):
        given = update["log_probs"].clone().requires_grad_()
        loss(given, denominators, *values, **mean)[0].backward()
        found.append(given.grad)
    assert found[0].abs().sum() > 0 and torch.equal(*found)


def test_both_kls_are_against_the_engine_and_a_token_that_is_not_finite_does_not_count():
    loss = BapoPolicyLoss(PolicyLoss(), as_clip_rule("paper"))
    (update, *_) = presets.make_updates()[0]
    mask, engines, log_probs = update["mask"].bool(), update["old_log_probs"], update["log_probs"]
    old = log_probs - 0.1
    *_, policy_kl, vllm_kl, _ = loss(log_probs, old, update["advantages"], mask, engines)
    assert policy_kl.item() == pytest.approx((engines - log_probs)[mask].mean().item(), abs=1e-6)
    assert vllm_kl.item() == pytest.approx((engines - old)[mask].mean().item(), abs=1e-6)

    engines = engines.clone()
    engines[0, 0] = torch.nan
    *_, policy_kl, vllm_kl, _ = loss(log_probs, old, update["advantages"], mask, engines)
    assert policy_kl.isfinite() and vllm_kl.isfinite()
    mask = mask.clone()
    mask[0, 0] = False
    ratio = (log_probs - update["old_log_probs"]).exp()
    expected = find_clip_bounds(ratio, update["advantages"], mask.long(), ClipConfig.preset("paper"))
    assert loss.updates[1].used.initial_share.item() == pytest.approx(expected.initial_share.item(), abs=1e-9)


@pytest.mark.parametrize("name", ["paper", "topr"])
def test_a_token_whose_engines_log_prob_is_not_finite_has_no_gradient(name):
    loss, (update, *_) = BapoPolicyLoss(PolicyLoss(), as_clip_rule(name)), presets.make_updates()[0]
    given, engines = update["log_probs"].clone().requires_grad_(), update["old_log_probs"].clone()
    engines[0, 0] = torch.nan
    loss(given, torch.zeros_like(engines), update["advantages"], update["mask"].bool(), engines)[0].backward()
    assert given.grad[0, 0] == 0 and given.grad.isfinite().all() and given.grad.abs().sum() > 0


MISTAKES = """
--policy_loss bapo --actor.loss_mode gspo => : ... --policy_loss bapo: ppo
--policy_loss m2 --actor.loss_agg_mode prompt-mean-token-mean => : ... token-mean, seq
--policy_loss topr --algo.advantage.is_correction_level seq => : ... off
--policy_loss bapo --algo.advantage.score_centering_top_k 8 => : ... : 0
--policy_loss bapo --actor.eps_clip_low_high 0.2 0.3 => : not allowed
--policy_loss bapo --bapo.ratio_lower_max 1.2 => --bapo.ratio_lower_max 1.2 ... <= 1
--policy_loss bapo --rollout.top_p 0.9 => : ... --policy_loss bapo: 1.0
--policy_loss bapo --rollout.temperature 0.005 => : ... --policy_loss bapo: from 0.01 to 2
--policy_loss bapo --actor.dual_clip 0.9 => : allowed: above 1
--policy_loss bap0 => --policy_loss ... 'bap0'
--bapo.preset paper => : allowed only with --policy_loss bapo
--policy_loss balanced --m2.budget 0.1 => : allowed only with --policy_loss m2
--policy_loss nowhere.py:Mine => : no file nowhere.py
--policy_loss own_rules:Mines => own_rules has no class 'Mines'
--policy_loss own_rules:Mine --rule.target 2 => own_rules:Mine: ... target 2.0 is not allowed
"""


@pytest.mark.parametrize(("argv", "said"), refusals.rows(MISTAKES))
def test_a_mistake_is_one_line_with_flag_value_and_what_is_allowed(directory, argv, said, capsys):
    assert refusals.says(refusal([*flags(directory), *argv.split()], capsys), said)


def test_the_engines_are_asked_for_log_probs_and_the_correction_keeps_every_token(directory):
    given = parse([*flags(directory), "--policy_loss", "bapo"]).algo.advantage
    found = given.is_correction_level, given.is_correction_mode, given.is_correction_gating
    assert found == ("token", "mask", "ratio")
    lowest, highest = given.is_correction_threshold
    assert lowest <= 1 <= highest


@pytest.mark.parametrize(("response", "reward"), [("It is \\boxed{7}.", 1.0), ("It is \\boxed{8}.", 0.0)])
def test_the_agent_rewards_a_right_final_answer(response, reward):
    from molt.agents.base import load_agent_runner

    runner = load_agent_runner(str(pipeline.REPOSITORY / "examples/molt/agent.py"))
    state = {"action_text": response, "label": "7"}
    assert asyncio.run(runner.env_cls().step(state)).reward == reward


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (policy_actor.PolicyTrainer.policy_train, "dataloader = DataLoader("),
        (policy_actor.PolicyTrainer.policy_train, "window_end = len(window) == accum_steps"),
        (policy_actor.PolicyTrainer.policy_train, "is_optimizer_step = idx == len(window) - 1"),
        (policy_actor.PolicyTrainer.training_step, "rollout_log_probs=rollout_log_probs,"),
        (BapoPolicyModelActor.__mro__[2].init_model_from_pretrained, "self.trainer = PolicyTrainer("),
        (BapoPolicyModelActor.__mro__[2].init_model_from_pretrained, 'os.path.join(args.ckpt.path, "_actor")'),
        (PolicyLoss.forward, "clip_eps_low=self.clip_eps_low,"),
        (ppo_policy_loss, "ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)"),
        (train_rl_ray.train, "from molt.trainer.workers.policy_actor import PolicyModelActor"),
        (train_rl_ray.train, 'if args.algo.advantage.is_correction_level != "off"'),
    ],
)
def test_molt_has_the_lines_that_ours_rest_on(where, line):
    assert line in inspect.getsource(where)


def test_without_a_policy_loss_of_ours_molt_is_as_it_was(directory):
    args = parse(flags(directory))
    assert args.policy_loss is None and args.algo.advantage.is_correction_level == "off"
    assert ACTORS[-1] is policy_actor.PolicyModelActor
    parse([*flags(directory), "--policy_loss", "ppo"])
    assert ACTORS[-1].__ray_metadata__.modified_class is BapoPolicyModelActor


if __name__ == "__main__":
    sys.exit(pytest.main(["--noconftest", "-q", "-rA", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
