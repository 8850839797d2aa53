"""Every variable of a recipe that is set from outside reaches its flag of the training command."""

import re
import shlex

import pipeline
import pytest


def words(text: str) -> dict[str, str]:
    """Return the values of NAME=VALUE words."""
    return dict(word.split("=", 1) for word in shlex.split(text))


# Values that no recipe has by default, all different: 22 prompts x 15 samples in 11 updates are batches of 30.
UNUSUAL = words("""
    MODEL=an/unusual-model DATA=/unusual/data.jsonl EVAL_DATA="/unusual/first.jsonl /unusual/second.jsonl"
    REWARD=http://unusual:1/get_reward RUN=/unusual/run NUM_NODES=3 PRESET=steady LEARNING_RATE=7.5e-7 TEMPERATURE=0.85
    MAX_PROMPT=321 MAX_RESPONSE=1234 SAMPLES=15 PROMPTS=22 UPDATES=11 EPOCHS=5 EPISODES=6 SAVE_STEPS=17 EVAL_STEPS=19
    EVAL_N=23
""")
FLAGS = words("""
    actor.model_name_or_path=an/unusual-model data.prompt_dataset=/unusual/data.jsonl
    eval.dataset=/unusual/first.jsonl,/unusual/second.jsonl reward.remote_url=http://unusual:1/get_reward
    ckpt.path=/unusual/run/checkpoints ckpt.output_dir=/unusual/run/model
    logger.tensorboard_dir=/unusual/run/tensorboard actor.num_nodes=3 bapo.preset=steady actor.adam.lr=7.5e-7
    rollout.temperature=0.85 data.max_len=1555 rollout.max_new_tokens=1234 rollout.n_samples_per_prompt=15
    rollout.batch_size=22 train.batch_size=30 train.max_epochs=5 train.num_episodes=6 ckpt.save_steps=17 eval.steps=19
    eval.n_samples_per_prompt=23
""")
# Where training and rollout take turns on the same GPUs, with an engine on each.
SHARED = "GPUS_PER_NODE=10 MAX_TOKENS=4321"
SHARED_FLAGS = "actor.num_gpus_per_node=10 train.max_tokens_per_gpu=4321 vllm.num_engines=30"
# By recipe: its further variables, and their flags. A ring decides its own MAX_TOKENS, and GPUs that only train or only
# roll out have their own variables: there, the shared variable changes no flag.
RECIPES = {
    "qwen7b": (SHARED, SHARED_FLAGS),
    "octothinker3b": (f"{SHARED} TEMPLATE='Unusual: {{}}'", f"{SHARED_FLAGS} data.input_template='Unusual: {{}}'"),
    "partial": (
        f"{SHARED} METHOD=bapo BUDGET=99 OVERSAMPLE=1.75",
        f"{SHARED_FLAGS} policy_loss=bapo partial.token_budget=99 partial.oversample=1.75",
    ),
    "qwen32b": (
        f"{SHARED} TENSOR_PARALLEL=2 RING_ATTN=4",  # 1555 tokens on 4 GPUs
        "actor.num_gpus_per_node=10 vllm.num_engines=15 vllm.tensor_parallel_size=2 ds.ring_attn_size=4 "
        "train.max_tokens_per_gpu=389",
    ),
    "async_partial": (
        f"{SHARED} METHOD=bapo ACTOR_GPUS_PER_NODE=9 ENGINES=14 QUEUE=8",
        "policy_loss=bapo actor.num_gpus_per_node=9 vllm.num_engines=14 train.max_tokens_per_gpu=4321 "
        "train.async_queue_size=8",
    ),
}


def command_of(script: str, **environment) -> dict[str, str]:
    """The flags that a recipe trains with; the last value of a flag that is given twice."""
    run = pipeline.run_script(f"train_bapo_{script}.sh", DRY_RUN="command", **environment)
    assert run.returncode == 0, run.stderr
    flags, name = {}, None
    for word in shlex.split(run.stdout)[2:]:
        name = word[2:] if word.startswith("--") else name
        flags[name] = "" if word.startswith("--") else word
    return flags


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_variable_of_a_recipe_is_in_its_flag(recipe):
    own, own_flags = map(words, RECIPES[recipe])
    expected = FLAGS | own_flags
    usual, unusual = command_of(recipe), command_of(recipe, **UNUSUAL | own)
    assert {name: unusual.get(name) for name in expected} == expected
    # All other flags keep their values, and none of these values is a default.
    assert {name: value for name, value in unusual.items() if usual.get(name) != value} == expected
    scripts = (pipeline.REPOSITORY / f"scripts/{name}.sh" for name in ("launch", f"train_bapo_{recipe}"))
    variables = re.findall(r"^([A-Z_]+)=\$\{\1:-", "".join(script.read_text() for script in scripts), re.MULTILINE)
    variables.append("PRESET")  # some leave its default to method.sh
    assert {*variables} == {*UNUSUAL, *own, "GPU_MEMORY"}


@pytest.mark.parametrize("recipe", ["partial", "async_partial"])
def test_a_recipe_for_stale_data_trains_with_tapered_weights_unless_it_is_given_a_method_or_a_preset(recipe):
    def rule(**environment: str) -> tuple[str, ...]:
        flags = command_of(recipe, **environment)
        return flags["policy_loss"], flags.get("bapo.preset", ""), flags.get("offpolicy.weight", "")

    assert rule() == ("ppo", "", "tapered")
    assert rule(PRESET="steady") == ("bapo", "steady", "")
    assert rule(METHOD="bapo") == ("bapo", "paper", "")
    assert rule(METHOD="bapo_tapered", PRESET="readme") == ("bapo", "readme", "tapered")


def test_a_recipe_without_an_evaluation_has_no_evaluation_flags():
    given, left_out = command_of("qwen7b"), command_of("qwen7b", EVAL_N=0)
    assert {name: value for name, value in given.items() if not name.startswith("eval.")} == left_out != given


def test_on_slurm_a_recipe_uses_the_jobs_nodes_and_gpus():
    flags = command_of("slurm", SLURM_JOB_NUM_NODES=3, SLURM_GPUS_ON_NODE=12)
    assert (flags["actor.num_nodes"], flags["actor.num_gpus_per_node"]) == ("3", "12")
    assert flags["vllm.num_engines"] == "9"  # of 4 GPUs each
    recipe = command_of("slurm", RECIPE="scripts/train_bapo_partial.sh", SLURM_JOB_NUM_NODES=2)
    assert recipe == command_of("partial", NUM_NODES=2)
