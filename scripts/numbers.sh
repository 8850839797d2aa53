# check_numbers LEAST NAME...: refuses variables that are not whole numbers of at least LEAST, which is 0 or 1.
check_numbers() {
  local least=$1 name
  shift
  for name; do
    if ! [[ ${!name} =~ ^(0|[1-9][0-9]*)$ && ${!name} -ge $least ]]; then
      echo "$name=${!name}: allowed: whole numbers of $least or more" >&2
      exit 2
    fi
  done
}
