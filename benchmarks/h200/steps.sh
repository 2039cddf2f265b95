# Sourced: a step is a process of its own with a limit and one line about it; none ends the script. Steps that would
# end after MINUTES are cut short or left out, so that results are collected in time.
LOGS=${LOGS:-/tmp/final}
mkdir -p "$LOGS"
DEADLINE=$(($(date +%s) + 60 * ${MINUTES:-8}))
export LOGS DEADLINE
step() { # NAME SECONDS COMMAND...: log in $LOGS/NAME.log, line in $LOGS/NAME.line
  local name=$1 limit=$2 began=$SECONDS code left=$((DEADLINE - $(date +%s)))
  shift 2
  if [ "$left" -lt 10 ]; then
    echo "$name: left out, no time (exit 125, 0 s)" | tee "$LOGS/$name.line"
    return 125
  fi
  timeout -k 10 $((limit < left ? limit : left)) "$@" >"$LOGS/$name.log" 2>&1
  code=$?
  echo "$name: $(grep -v '^ *$' "$LOGS/$name.log" | tail -n 1 | cut -c1-160) (exit $code, $((SECONDS - began)) s)" |
    tee "$LOGS/$name.line"
  return $code
}
gpu_tests() { # NAME FILE [EXPRESSION]: the GPU tests of a file that match
  step "tests-$1" "${LIMIT:-270}" python3 -m pytest -o addopts= -q -m gpu -p no:cacheprovider --tb=short "$2" ${3:+-k "$3"}
}
say() { echo "[$SECONDS s] $*"; }
export -f step gpu_tests
