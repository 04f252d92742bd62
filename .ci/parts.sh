# The parts of .ci/run: each is a command with its time, its log and, where it fails, one line that
# says why. Sourced in the root of the checkout; build/ci has the logs.

failed=()  # one line for each part that failed
skipped=() # one line for each part that was left out

say() { printf '\n=== %s\n' "$*"; }

part() { # command…
  say "$*"
  local began=$SECONDS log="build/ci/$((${#parts_done[@]} + 1)).log"
  parts_done+=("$*")
  # A test runner that finds no tests (pytest's exit code 5) fails here like any other failure.
  "$@" </dev/null 2>&1 | tee "$log"
  if ((PIPESTATUS[0] != 0)); then
    failed+=("$*: $("${PYTHON:-python3}" .ci/reason.py "$log")")
  fi
  printf '%s\t%s\n' $((SECONDS - began)) "$*" >>build/ci/minutes.tsv
  say "$* took $((SECONDS - began)) s"
}
parts_done=()

skip() { # why…
  say "skipped: $*"
  skipped+=("$*")
}

summary() { # a report of pytest; the exit code of the whole run
  local total
  say "summary"
  if ! total=$("${PYTHON:-python3}" .ci/total.py "$1"); then failed+=("summary: $total"); fi
  ((${#skipped[@]})) && printf 'skipped: %s\n' "${skipped[@]}"
  ((${#failed[@]})) && printf 'FAILED: %s\n' "${failed[@]}"
  # Alone on the last line, as other tools read it.
  echo "$total"
  ((${#failed[@]} == 0))
}
