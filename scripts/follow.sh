# follow LOG EVERY COMMAND...: runs a training command to its end, with its output in LOG and every EVERY-th step shown.
# Slurm and Kubernetes send SIGTERM to the script alone, so it is passed on to the command. Ctrl-C reaches both. A
# submitted job is another process, which goes on: Ray would stop it without a checkpoint.
follow() {
  local log=$1 every=$2 status=0 is_job= training shown
  shift 2
  [ "$1" != submit ] || is_job=1
  exec 3> >(exec .venv/bin/openrlhf-bapo progress --log "$log" --every "$every" 3>&-)
  shown=$!
  "$@" >&3 2>&1 3>&- &
  training=$!
  exec 3>&-
  trap 'kill -TERM "$training"; ${is_job:+say_how_to_stop "$log"}' TERM
  trap '${is_job:+kill -TERM "$training"}; ${is_job:+say_how_to_stop "$log"}' INT
  while kill -0 "$training" 2>/dev/null; do # a signal interrupts `wait`, not the command
    status=0
    wait "$training" || status=$?
  done
  wait "$shown"
  trap - TERM INT
  return "$status"
}

say_how_to_stop() {
  local id
  id=$(grep -om1 'raysubmit_[[:alnum:]]*' "$1" || echo ID)
  echo "the job goes on; this ends it at once: .venv/bin/ray job stop --address $SUBMIT $id" >&2
}
