# follow LOG EVERY COMMAND...: runs a training command to its end, with its output in LOG and every EVERY-th step shown.
# Slurm and Kubernetes send SIGTERM to the script alone, so it is passed on to the command. Ctrl-C reaches both.
follow() {
  local log=$1 every=$2 status=0 training shown
  shift 2
  exec 3> >(exec .venv/bin/openrlhf-bapo progress --log "$log" --every "$every" 3>&-)
  shown=$!
  "$@" >&3 2>&1 3>&- &
  training=$!
  exec 3>&-
  trap 'kill -TERM "$training"' TERM
  trap : INT
  while kill -0 "$training" 2>/dev/null; do # a signal interrupts `wait`, not the command
    status=0
    wait "$training" || status=$?
  done
  wait "$shown"
  trap - TERM INT
  return "$status"
}
