# Runs a recipe. A train_bapo_*.sh script sets the variables in which it differs from the defaults below, sources this
# file, adds its own flags to the array FLAGS, and calls `launch "$@"`.
#
# Every variable below can be set from outside, and so can these:
#   DRY_RUN=1        check all flags, print the resolved configuration and the plan; needs no GPU and no Ray
#   DRY_RUN=command  print the training command, to run it by hand
#   RAY_ADDRESS=...  join a running Ray cluster; without it, one is started on this machine
#   SUBMIT=URL       train as a job of a running Ray cluster (ray job submit --address URL)
#   OVERRIDES=FILE   further flags with their values, as a shell reads them (quote a value that contains spaces); lines
#                    that start with # are comments; these flags win over the recipe's
#   METHOD=...       bapo (for stale data: tapered), or a baseline to compare it with: scripts/method.sh
#
# "ours" marks a value that the paper does not state. Paths must be the same on every node.

MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-7B} # the paper's validation (section 5.1)
DATA=${DATA:-$PWD/data/skywork-or1.jsonl} # SkyWork-OR1-RL (the paper's section 5.1); made if it is missing
EVAL_DATA=${EVAL_DATA:-data/aime24.jsonl data/aime25.jsonl} # separated by spaces; made if they are missing
REWARD=${REWARD:-$PWD/examples/math_reward.py} # a reward-function file, or http://HOST:PORT/get_reward[,...]
recipe=$(basename "$0" .sh)
RUN=${RUN:-$PWD/runs/${recipe#train_bapo_}} # folder of checkpoints, model, logs and curves
if [[ -n ${SUBMIT:-} && $RUN != /* ]]; then RUN=$PWD/$RUN; fi # the job begins in another folder

NUM_NODES=${NUM_NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}     # where training and rollout share GPUs
GPU_MEMORY=${GPU_MEMORY:-80}          # GiB per GPU, for the plan
MAX_TOKENS=${MAX_TOKENS:-16384}       # tokens that a GPU trains on at once (ours)

LEARNING_RATE=${LEARNING_RATE:-2e-6}  # the paper's validation (section 5.1); for other models than its 7B: ours
TEMPERATURE=${TEMPERATURE:-0.6}       # the paper's validation (section 5.1); for other models than its 7B: ours
MAX_PROMPT=${MAX_PROMPT:-1024}        # tokens (ours)
MAX_RESPONSE=${MAX_RESPONSE:-8192}    # tokens: the paper's validation (section 5.1); for other models than its 7B: ours
SAMPLES=${SAMPLES:-16}                # responses per prompt (the authors' released example)
PROMPTS=${PROMPTS:-128}               # prompts per rollout (ours)
# The paper's staleness E is E + 1 rounds on the same samples (section 4.2, Algorithm 1). If a round is an optimizer step
# (our reading), E is UPDATES x EPOCHS - 1 here.
UPDATES=${UPDATES:-4}                 # optimizer steps per rollout and epoch (ours; the released example: 4)
EPOCHS=${EPOCHS:-1}                   # passes over a rollout (ours; the released example: 2)
EPISODES=${EPISODES:-1}               # passes over the prompts (ours)
SAVE_STEPS=${SAVE_STEPS:-20}          # rollouts between checkpoints (ours)
EVAL_STEPS=${EVAL_STEPS:-20}          # rollouts between evaluations (ours)
EVAL_N=${EVAL_N:-16}                  # responses per problem (section 5.1's evaluation: 16); 0: no evaluation

FLAGS=()      # of the training command
EVAL_FLAGS=() # of the evaluation at the end

source scripts/numbers.sh # for the variables that are calculated with; the commands check the others
check_numbers 1 NUM_NODES GPUS_PER_NODE MAX_PROMPT MAX_RESPONSE SAMPLES PROMPTS UPDATES
check_numbers 1 ${RING_ATTN:+RING_ATTN} ${TENSOR_PARALLEL:+TENSOR_PARALLEL}
check_numbers 0 EVAL_N

# Let training and rollout take turns on the same GPUs, with an engine on each GPU.
colocate() {
  ACTOR_GPUS_PER_NODE=$GPUS_PER_NODE
  FLAGS+=(
    --train.colocate_all
    --train.max_tokens_per_gpu "$MAX_TOKENS"
    --ds.enable_sleep
    --vllm.num_engines $((NUM_NODES * GPUS_PER_NODE))
    --vllm.gpu_memory_utilization 0.7
    --vllm.enable_sleep
  )
}

# Run a command as a job. Ray joins its words without a shell's quotes, so they are in a file.
submit() {
  local file
  file=$(cd "$RUN" && pwd)/job-$2.sh
  printf '%q ' "$@" >"$file"
  exec .venv/bin/ray job submit --address "$SUBMIT" -- bash "$file"
}

# Train, draw the curves and evaluate; the arguments are further flags of the training command.
launch() {
  source scripts/method.sh
  local samples=$((PROMPTS * SAMPLES))
  if [ $((samples % UPDATES)) -ne 0 ]; then
    echo "UPDATES=$UPDATES: allowed: divisors of the $samples samples of a rollout (PROMPTS x SAMPLES)" >&2
    exit 2
  fi
  FLAGS=(
    "${METHOD_FLAGS[@]}"
    --actor.model_name_or_path "$MODEL"
    --actor.num_nodes "$NUM_NODES"
    --actor.num_gpus_per_node "$ACTOR_GPUS_PER_NODE"
    --actor.adam.lr "$LEARNING_RATE"
    --actor.lr_scheduler constant         # ours
    --actor.gradient_checkpointing_enable
    --algo.advantage.estimator group_norm # GRPO's
    --algo.kl.init_coef 0                 # no KL term: ours
    --reward.remote_url "$REWARD"
    --data.prompt_dataset "$DATA"
    --data.input_key input
    --data.label_key label
    --data.max_len $((MAX_PROMPT + MAX_RESPONSE))
    --rollout.batch_size "$PROMPTS"
    --rollout.n_samples_per_prompt "$SAMPLES"
    --rollout.max_new_tokens "$MAX_RESPONSE"
    --rollout.temperature "$TEMPERATURE"
    --train.batch_size $((samples / UPDATES))
    --train.max_epochs "$EPOCHS"
    --train.num_episodes "$EPISODES"
    --train.dynamic_batch_enable          # responses differ in length by a factor of ten
    --ds.zero_stage 3
    --ds.packing_samples
    --vllm.enable_prefix_caching          # the responses of a prompt share its KV
    --ckpt.path "$RUN/checkpoints"
    --ckpt.output_dir "$RUN/model"
    --ckpt.save_steps "$SAVE_STEPS"
    --ckpt.max_num 2
    --logger.tensorboard_dir "$RUN/tensorboard"
    "${FLAGS[@]}"
  )
  local words file files=("$DATA") eval_data=()
  if [ "$EVAL_N" -gt 0 ]; then
    for file in $EVAL_DATA; do # a submitted job runs in another folder
      eval_data+=("$([[ $file = /* ]] || echo "$PWD/")$file")
    done
    files+=("${eval_data[@]}")
    FLAGS+=(
      --eval.dataset "$(IFS=, && echo "${eval_data[*]}")"
      --eval.steps "$EVAL_STEPS"
      --eval.n_samples_per_prompt "$EVAL_N"
      --eval.temperature 0.6              # ours: that of the paper's validation runs (section 5.1)
    )
  fi
  if [ -n "${OVERRIDES:-}" ]; then
    mapfile -t words < <(sed '/^[[:space:]]*#/d' "$OVERRIDES" | xargs -r printf '%s\n')
    wait $! || {
      echo "OVERRIDES=$OVERRIDES: cannot be read; allowed: a file of flags and values, with every quote closed" >&2
      exit 2
    }
    FLAGS+=("${words[@]}")
  fi
  FLAGS+=("$@")
  local flag variable
  for flag in ${words[@]+"${words[@]}"} "$@"; do # what is done before and after the training looks at the variable
    case ${flag%%=*} in
      --ckpt.path | --ckpt.output_dir | --logger.tensorboard_dir) variable=RUN ;;
      --reward.remote_url) variable=REWARD ;;
      *) continue ;;
    esac
    echo "${flag%%=*}: the recipe would resume, draw or evaluate without it; allowed in its place: $variable=..." >&2
    exit 2
  done

  if [ "${DRY_RUN:-}" = command ]; then
    printf '%q ' .venv/bin/openrlhf-bapo train "${FLAGS[@]}"
    exit
  fi
  bash scripts/setup.sh
  if [ -n "${DRY_RUN:-}" ]; then
    exec .venv/bin/openrlhf-bapo plan --plan.gpu_memory "$GPU_MEMORY" "${FLAGS[@]}"
  fi

  if [[ -e $RUN/method && $(<"$RUN/method") != "${METHOD_FLAGS[*]}" ]] &&
    [[ -e $RUN/checkpoints/_actor/latest || -e $RUN/evaluation/config.json ]]; then
    echo "METHOD=$METHOD: $RUN was trained with $(<"$RUN/method"); allowed: that, another RUN, or no $RUN/method" >&2
    exit 2
  fi
  for file in "${files[@]}"; do
    [ -e "$file" ] || .venv/bin/openrlhf-bapo data "$(basename "$file" .jsonl)" "$file"
  done
  mkdir -p "$RUN"
  echo "${METHOD_FLAGS[*]}" >"$RUN/method"
  local command=("$PWD/.venv/bin/openrlhf-bapo") log
  if [ -n "${SUBMIT:-}" ]; then
    command=(submit "${command[@]}")
  fi
  if [ -e "$RUN/evaluation/config.json" ]; then
    echo "the training in $RUN is complete; without $RUN/evaluation it would continue"
  else
    if [ -e "$RUN/checkpoints/_actor/latest" ]; then
      echo "resuming from $RUN/checkpoints"
      FLAGS+=(--ckpt.load_enable)
    fi
    log=$RUN/train-$(date +%Y%m%d-%H%M%S).log
    echo "training in $RUN (the whole output goes to $log)"
    source scripts/follow.sh
    follow "$log" 1 "${command[@]}" train "${FLAGS[@]}"
    .venv/bin/openrlhf-bapo plot "$RUN/tensorboard" -o "$RUN/curves.png"
  fi
  if [ "$EVAL_N" -gt 0 ]; then
    "${command[@]}" evaluate --model "$RUN/model" --data "${eval_data[@]}" --n "$EVAL_N" --reward "$REWARD" \
      --max_new_tokens "$MAX_RESPONSE" --tensor_parallel_size "${TENSOR_PARALLEL:-1}" --out "$RUN/evaluation" \
      "${EVAL_FLAGS[@]}"
  fi
}
