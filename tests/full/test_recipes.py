"""The recipes for GPU clusters: their plans, and each of them run for real with only model and sizes shrunk."""

import contextlib
import json
import re
import shlex
import shutil
import urllib.request
from pathlib import Path

import pipeline
import pytest
import torch
from safetensors.torch import load_file

from openrlhf_bapo.cli import plan
from openrlhf_bapo.cli.plot import read_scalars
from openrlhf_bapo.run.plan import REMEDIES, Machine, make_plan, read_shape

RECIPES_PAGE = (pipeline.REPOSITORY / "docs" / "recipes.md").read_text()


def planned_by(capsys, script: str, *flags: str, **environment) -> tuple[int, list[str], str]:
    """Exit code and output of a recipe's dry run, in this process: starting one takes ten seconds."""
    command = pipeline.run_script(f"train_bapo_{script}.sh", DRY_RUN="command", **environment).stdout
    with pytest.raises(SystemExit) if flags or environment else contextlib.nullcontext() as exit_:
        plan.main([*shlex.split(command)[2:], *flags])
    output = capsys.readouterr()
    return exit_.value.code if exit_ else 0, output.out.splitlines(), output.err


@pytest.mark.parametrize(
    ("script", "gpus", "billions"),
    [
        ("qwen32b", "64,", "32.76"),
        ("qwen7b", "8,", "7.62"),
        ("octothinker3b", "8,", "3.21"),
        ("partial", "8,", "7.62"),
        ("async_partial", "8: 4 actor, 4 engines", "7.62"),
    ],
)
def test_every_recipe_passes_both_sides_checks_and_fits_its_machine(capsys, script, gpus, billions):
    code, lines, _ = planned_by(capsys, script)
    output = "\n".join(lines)
    assert code == 0 and lines[-1] == "everything fits"
    assert re.search(rf"GPUs +{gpus}", output) and f"{billions} billion parameters" in output
    assert f"policy_loss: {'ppo' if 'partial' in script else 'bapo'}" in output and "remote_url=" in output
    assert re.search("optimizer steps per rollout +4,", output)
    # The table of docs/recipes.md has these figures.
    phases = {name: float(size) for size, name in re.findall(r"^ +([\d.]+) GiB  (\w[^=\n]*)$", output, re.MULTILINE)}
    training = max(size for name, size in phases.items() if name not in ("generation", "weight sync"))
    (row,) = [line for line in RECIPES_PAGE.splitlines() if f"train_bapo_{script}.sh` |" in line]
    assert row.endswith(f"| {phases['generation']:.0f} / {training:.0f} |")


def test_a_dry_run_needs_no_ray_and_on_slurm_asks_for_its_nodes():
    slurm = dict(SLURM_JOB_NUM_NODES=4, RAY_ADDRESS="127.0.0.1:1")
    dry = pipeline.run_script("train_bapo_slurm.sh", "--replay.ratio", "1", DRY_RUN=1, **slurm)
    assert dry.returncode == 0, dry.stdout[-2000:] + dry.stderr[-2000:]
    assert re.search("optimizer steps per rollout +8,", dry.stdout)  # half of them for replayed samples
    assert re.search(r"GPUs +32,", dry.stdout) and "replay pool = 1,024 groups x 16 samples x 66,560" in dry.stdout
    assert dry.stdout.rstrip().endswith("everything fits")


def test_a_wrong_flag_in_a_recipe_is_one_line(capsys):
    code, _, error = planned_by(capsys, "qwen7b", "--train.batch_sise", "256")
    assert code == 2
    assert error.splitlines()[-1] == "openrlhf-bapo: unrecognized arguments: --train.batch_sise 256"


def test_a_memory_overflow_is_one_line_with_the_phase_and_its_largest_terms(capsys):
    code, lines, _ = planned_by(capsys, "qwen32b", RING_ATTN=1)
    assert code == 1
    (line,) = [line for line in lines if line.startswith("does not fit:")]
    assert re.search(r"every GPU needs \d+\.\d GiB of 80 in the phase 'backward through the logits'", line)
    largest = re.search(r"\(largest: (logits and their gradients .*) GiB\); raise --ds.ring_attn_size", line)[1]
    sizes = [float(term.rpartition(" ")[2]) for term in largest.split(", ")]
    assert len(sizes) == 3 and sizes == sorted(sizes, reverse=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The harness's model, with a chat template and room for long responses."""
    from transformers import AutoTokenizer

    directory = pipeline.make_model(tmp_path_factory.mktemp("tiny"), num_prompts=160)
    config = directory / "model/config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 512'))
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory / "model")
    return directory


@pytest.fixture
def planned(tiny):
    """Arguments of a run that fits 80 GiB, and its model's shape."""
    flags = pipeline.flags(tiny, policy_loss="bapo", train__batch_size=32, train__micro_batch_size=8)
    return pipeline.parse(flags), read_shape(str(tiny / "model"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"train.colocate_all": True, "vllm.num_engines": 2}, "--vllm.num_engines 2 x .* the actor's 1 GPUs"),
        ({"vllm.tensor_parallel_size": 4}, "--vllm.tensor_parallel_size 4: .* 2 attention heads"),
        ({"actor.num_gpus_per_node": 3, "ds.ring_attn_size": 2}, "--ds.ring_attn_size 2 x .* 3 GPUs"),
        ({"ds.ring_attn_size": 8}, "--ds.ring_attn_size 8 x .* 1 GPUs"),
        ({"train.batch_size": 20}, "--train.batch_size 20: .* multiple of 8"),
        ({"train.batch_size": 128}, "--train.batch_size 128: .* only 64 samples"),
        ({"data.max_len": 4096}, "--data.max_len 4096: .* 512 positions"),
        ({"rollout.max_new_tokens": 24}, "--rollout.max_new_tokens 24: .* --data.max_len 24"),
        ({"vllm.gpu_memory_utilization": 0.001}, "--vllm.gpu_memory_utilization 0.001: .* KV"),
        ({"vllm.gpu_memory_utilization": 1.1}, "engine's GPU needs .* 'generation' .* lower --vllm.gpu_memory_util"),
        (
            {"rollout.batch_size": 10**9, "rollout.micro_batch_size": 10**9},
            "actor's GPU needs .* 'log-probs' .* --rollout.micro_batch_size",
        ),
    ],
)
def test_what_would_fail_only_after_ray_has_started_is_in_the_plan(planned, changes, problem):
    args, shape = planned
    assert make_plan(args, shape, Machine()).problems == []
    for flag, value in changes.items():
        group, name = flag.split(".")
        setattr(getattr(args, group), name, value)
    assert any(re.search(problem, line) for line in make_plan(args, shape, Machine()).problems)


def test_a_token_budget_is_planned_with_its_rollouts_staleness_and_what_is_prefilled_again(planned):
    args, shape = planned
    assert not any("budget" in name for name in make_plan(args, shape, Machine()).facts)
    args.partial.token_budget, args.partial.max_staleness, args.partial.oversample = 3, 5, 1.3
    args.train.async_enable, args.train.async_queue_size = True, 2
    facts = make_plan(args, shape, Machine()).facts
    # 8 tokens by 3: three rollouts, which prefill the prompt's 16 tokens with 3 and 6 of the response.
    assert "a response of 8 takes 3 rollouts" in facts["token budget"]
    assert "at most 21 prompts in flight for 16" in facts["token budget"]
    assert facts["staleness in policy versions"] == "fresh samples at most 7"
    assert facts["prefilled again"].startswith("41 tokens of prompt and prefix for a response of 8, 0.00 GiB")
    assert "responses cut" not in facts
    args.partial.max_segments = 2
    assert "2 x 3 tokens they are dropped" in make_plan(args, shape, Machine()).facts["responses cut"]


def test_a_lag_is_planned_with_the_prompts_that_wait(planned):
    args, shape = planned
    assert "lag" not in make_plan(args, shape, Machine()).facts
    args.offpolicy.lag = 3
    said = "3 rollouts wait (48 prompts); staleness is 3 from an episode's training step 4 on"  # 16 per rollout
    assert make_plan(args, shape, Machine()).facts["lag"] == said


def test_there_is_a_remedy_for_every_phase(planned):
    args, shape = planned
    args.train.colocate_all = True
    (phases,) = make_plan(args, shape, Machine()).phases.values()
    assert {phase.name for phase in phases} == set(REMEDIES)


def test_openrlhfs_own_refusals_are_one_line(tiny, capsys):
    flags = pipeline.flags(tiny, policy_loss="bapo", train__partial_rollout_enable=True)
    assert pipeline.refusal(flags, capsys, plan.main).startswith("--train.partial_rollout_enable")


@pytest.mark.parametrize(
    ("given", "changed", "message"),
    [
        (["--plan.model", "tests"], {}, "--plan.model tests: .* allowed: a folder with a config.json"),
        (["--plan.gpu_memory", "0"], {}, "--plan.gpu_memory 0.0: allowed: above 0"),
        ([], {"vllm__num_engines": None}, "--vllm.num_engines: is missing; allowed: 1 or more"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tiny, capsys, given, changed, message):
    argv = [*given, *pipeline.flags(tiny, policy_loss="bapo", **changed)]
    assert re.search(message, pipeline.refusal(argv, capsys, plan.main))


def run_tiny(
    script: str, tiny: Path, name: str, *flags: str, tree: Path | None = None, **environment
) -> list[dict[str, float]]:
    """Run a recipe with tests/support/tiny_recipe.flags over it; the metrics of its global steps."""
    directory = tiny / name
    process = pipeline.run_script(
        f"train_bapo_{script}.sh",
        *flags,
        tree=tree or pipeline.warm_tree(),
        OVERRIDES="tests/support/tiny_recipe.flags",
        MODEL=tiny / "model",
        DATA=tiny / "train.jsonl",
        RUN=directory,
        **{"EVAL_DATA": tiny / "train.jsonl", "EVAL_N": 0, "TENSOR_PARALLEL": 1} | environment,
    )
    (log,) = directory.glob("train-*.log")
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:] + log.read_text()[-3000:]
    return pipeline.steps(log.read_text())


def test_qwen32b_trains_on_two_ranks_evaluates_and_saves_what_transformers_loads(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = (tiny / "train.jsonl").read_text().splitlines(keepends=True)
    (tiny / "heldout.jsonl").write_text("".join(rows[-4:]))
    logged = run_tiny(
        "qwen32b",
        tiny,
        "qwen32b",
        *("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2", "--data.max_samples", "16"),
        *("--actor.adam.lr", "5e-4"),
        REWARD=tiny / "reward.py",
        EVAL_DATA=tiny / "heldout.jsonl",
        EVAL_STEPS=1,
        EVAL_N=2,
        MAX_RESPONSE=8,
    )
    assert len(logged) == 2
    for metrics in logged:
        assert 0.6 <= metrics["bapo/clip_low"] <= 0.9 and 1.2 <= metrics["bapo/clip_high"] <= 3.0
        assert 0 < metrics["bapo/positive_share"] < 1 and 0 < metrics["bapo/initial_share"] < 1
        assert 0 <= metrics["bapo/target_reached"] <= 1
        assert 0 <= metrics["bapo/clip_frac_positive"] <= 1 and 0 <= metrics["bapo/clip_frac_negative"] <= 1
        assert metrics["timing/bapo_ratio_forward"] > 0 and metrics["timing/bapo_search"] > 0
        phases = ("generation", "make_experience", "ppo_train", "broadcast")
        assert metrics["timing/step_total"] == pytest.approx(sum(metrics[f"timing/{phase}"] for phase in phases))
        assert metrics["entropy_loss"] > 0 and metrics["actor_grad_norm"] > 0
    # The second rollout came from trained weights: its behaviour log-probs are those of the actor after two updates.
    assert logged[0]["entropy_loss"] != logged[1]["entropy_loss"]
    scalars = read_scalars(tiny / "qwen32b/tensorboard")
    for name in ("clip_low", "clip_high", "positive_share", "initial_share", "target_reached"):
        assert scalars[f"train/bapo/{name}"][1] == pytest.approx([metrics[f"bapo/{name}"] for metrics in logged])
    assert scalars["eval/eval_sums_pass1"][0] == [1, 2]

    saved = tiny / "qwen32b/model"
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny / "model", saved))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert model.generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=4).shape[1] > 4
    results = json.loads((tiny / "qwen32b/evaluation/results.json").read_text())
    assert results["config"]["model"].startswith(str(saved))


def test_qwen7b_trains_on_rewards_of_the_math_server(tiny):
    port = pipeline.free_port()
    server = ["bash", "scripts/serve_math_reward.sh", "--host", "127.0.0.1", "--port", str(port)]
    with pipeline.running(server, log := tiny / "math_server.log") as process:
        pipeline.wait_until(lambda: all_answer(f"http://127.0.0.1:{port}/health"), process, log)
        (metrics,) = run_tiny("qwen7b", tiny, "qwen7b", REWARD=f"http://127.0.0.1:{port}/get_reward")
    assert metrics["rollout/num_samples"] == 32 and 0 <= metrics["rollout/reward_mean"] <= 1
    assert metrics["graded_timeouts"] == metrics["graded_crashes"] == 0


def test_partial_trains_on_resumed_responses_on_two_ranks_with_two_engines(tiny):
    two = ("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2", "--data.max_samples", "32")
    steps = run_tiny("partial", tiny, "partial", *two, BUDGET=3, OVERSAMPLE=2, REWARD=tiny / "reward.py")
    assert len(steps) == 4
    assert sum(step["partial/started"] for step in steps) == sum(step["partial/taken"] for step in steps) == 32
    assert max(step["partial/segments_max"] for step in steps) >= 3  # of 8 tokens by 3
    assert max(step["offpolicy/staleness_max"] for step in steps) >= 1


def test_octothinker3b_trains_on_rewards_of_the_math_file(tiny):
    (metrics,) = run_tiny("octothinker3b", tiny, "octothinker3b")
    assert metrics["rollout/num_samples"] == 32 and 0 <= metrics["rollout/reward_mean"] <= 1
    assert 0.8 <= metrics["bapo/clip_low"] <= 0.9 and metrics["bapo/clip_high"] <= 2.0


def test_async_partial_trains_on_stale_tokens_as_a_submitted_job_with_openrlhfs_reward_server(tiny):
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    Qwen2ForSequenceClassification(config).to(torch.bfloat16).save_pretrained(tiny / "reward_model")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tiny / "reward_model")
    gcs, dashboard, agent, client, port = (pipeline.free_port() for _ in range(5))
    # Sockets need short paths, and a cluster of our own its own folder.
    temporary = Path(f"/tmp/openrlhf-bapo-{gcs}")
    programs = pipeline.warm_tree() / ".venv/bin"
    head = [programs / "ray", "start", "--head", "--block", "--num-gpus=2", "--num-cpus=4", f"--port={gcs}"]
    head += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", "--disable-usage-stats"]
    # The whole head ends when its client server does not get its port, 10001 unless told.
    head += [f"--ray-client-server-port={client}", f"--temp-dir={temporary}"]
    # It also ends when one of the dashboard's parts has not started in 30 s, which a loaded machine may take.
    patience = {"RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(pipeline.PATIENCE)}
    server = [programs / "openrlhf-bapo", "serve-rm", "--reward.model_name_or_path", tiny / "reward_model"]
    server += ["--host", "127.0.0.1", "--port", str(port)]
    # Settings of this test alone: a longer run with replay, and the settings of a run on the CPU that joins a cluster.
    flags = {
        "data.max_samples": 128,
        "data.max_len": 72,
        "rollout.max_new_tokens": 64,
        "rollout.batch_size": 16,
        "rollout.vllm_generate_batch_size": 16,
        "train.batch_size": 64,
        "train.max_tokens_per_gpu": 2048,
        "replay.ratio": 1,
        "replay.max_staleness": 2,
        "actor.adam.lr": 1e-3,
        "vllm.sync_backend": "gloo",
    }
    try:
        with (
            pipeline.running(server, tiny / "serve_rm.log"),
            pipeline.running(head, tiny / "head.log", **patience) as process,
        ):
            # The dashboard takes jobs, and its agent runs them; any of the three may be the last to answer.
            paths = {dashboard: "api/version", agent: "api/local_raylet_healthz", port: "openapi.json"}
            urls = [f"http://127.0.0.1:{number}/{path}" for number, path in paths.items()]
            pipeline.wait_until(lambda: all_answer(*urls), process, tiny / "head.log")
            steps = run_tiny(
                "async_partial",
                tiny,
                "async_partial",
                *(text for name, value in flags.items() for text in (f"--{name}", str(value))),
                "--vllm.enforce_eager",
                REWARD=f"http://127.0.0.1:{port}/get_reward",
                SUBMIT=f"http://127.0.0.1:{dashboard}",
            )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    assert len(steps) == 8
    assert "POST /get_reward" in (tiny / "serve_rm.log").read_text()
    assert len({step["rollout/reward_mean"] for step in steps}) >= 6  # a model's, real numbers
    # Fresh tokens are as old as the recipe's queue allows, replayed ones as --replay.max_staleness does; against whom
    # their ratios are: tests/integration/test_replay_pipeline.py.
    assert 0 < max(step["offpolicy/staleness_max"] for step in steps) <= 2
    assert steps[0]["replay/groups_sampled"] == 0 < max(step["replay/groups_sampled"] for step in steps)


def all_answer(*urls: str) -> bool:
    """Whether these servers do, for `pipeline.wait_until`."""
    with contextlib.suppress(OSError):
        return all(urllib.request.urlopen(url) for url in urls)
    return False
