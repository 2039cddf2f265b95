#!/bin/bash
# Correctness on a GPU in one command of less than ten minutes (16 cores): GPU tests, 5,000 launches of every present
# setting, storing and publishing, 1,000 replays, compute-sanitizer. Steps run side by side, since compilation takes
# longest; each has a limit and one line. Exit 1 when anything failed.
#   LAUNCHES=500 for a shorter run   SANITIZE=0 without sanitizer   JOBS=processes
cd "$(dirname "$0")/../.." || exit 2
. benchmarks/h200/env.sh
. benchmarks/h200/steps.sh
export OUT LAUNCHES=${LAUNCHES:-5000}
mkdir -p "$OUT"
rm -rf "${LOGS:?}"/*

check() { # CASE: errors, and every setting's launches compared bit by bit
  step "check-$1" 240 python3 benchmarks/h200/projection.py check --case "$1" --rows 1 8 16 32 64 \
    --launches "$LAUNCHES" --out "$LOGS/check-$1.json"
  grep -h WRONG "$LOGS/check-$1.log"
}
publish() { # CASE
  step "publish-$1" 240 python3 benchmarks/h200/publication.py --case "$1" --rows 1 8 16 32 64 \
    --launches "$LAUNCHES" --out "$LOGS/publish-$1.json"
  grep -h WRONG "$LOGS/publish-$1.log"
}
sanitize() { # TOOL NAME COMMAND...
  local tool=$1 name=$2
  shift 2
  # API errors are the probing of optional driver functions at import
  step "$tool-$name" 240 compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
    $([ "$tool" = racecheck ] && echo --racecheck-report all) "$@"
}
export -f check publish sanitize

CASES="kda_in_proj mla_in_proj mla_q_b o_proj moe_front shared_gate_up shared_down dense_gate_up dense_down lm_head"
P=tests/kimi_k3/kernels/test_stream_projection_gpu.py
K=tests/kimi_k3/kernels/test_kda_core_gpu.py A=tests/kimi_k3/kernels/test_attn_res_gpu.py

# comparing times needs the GPU alone: that test comes last
step tests 300 python3 -m pytest -q -m gpu -n "${JOBS:-15}" --dist worksteal --tb=short -k "not brings_weights" tests
{
  for tp in 8 16; do for op in o_proj moe_front shared_down dense_down; do echo "publish kimi-k3-tp$tp-$op"; done; done
  for tp in 8 16; do for op in $CASES; do echo "check kimi-k3-tp$tp-$op"; done; done
  if [ "${SANITIZE:-1}" != 0 ]; then
    for tool in memcheck synccheck racecheck; do
      for case in o_proj moe_front shared_gate_up; do
        echo "sanitize $tool $case python3 benchmarks/h200/projection.py check --case small-tp8-$case --rows 1 8 16 64"
      done
      echo "sanitize $tool publication python3 benchmarks/h200/publication.py --case small-tp8-o_proj --rows 1 8 16 64"
      echo "sanitize $tool kda python3 -m pytest -o addopts= -q -m gpu -p no:cacheprovider $K -k null_slots"
      echo "sanitize $tool attn_res python3 -m pytest -o addopts= -q -m gpu -p no:cacheprovider $A -k 'batches and 8-256'"
      echo "sanitize $tool embed python3 -m pytest -o addopts= -q -m gpu -p no:cacheprovider $P -k 'test_embedding or pieces'"
    done
  fi
} | tr '\n' '\0' | xargs -0 -P "${JOBS:-15}" -I{} bash -c '{}'
gpu_tests prefetch $P brings_weights # compares times: alone
python3 benchmarks/h200/projection.py floor >"$OUT/floor.json" 2>"$LOGS/floor.log" || say "no floor"
for what in check publish; do
  python3 benchmarks/h200/collect.py check "$LOGS/$what"-*.json "$OUT/${what}_launches.json" "$OUT/floor.json"
done
cat "$LOGS"/*.line | sort >"$OUT/steps.txt"
grep -hE "^(FAILED|ERROR|E  )" "$LOGS"/tests-*.log | head -60 | tee "$OUT/failures.txt"
grep -hE "SUMMARY" "$LOGS"/{mem,sync,race}check-*.log | sort | uniq -c
tar czf "$OUT/logs1.tar.gz" -C "$LOGS" .
failed=$(grep -vc "(exit 0," "$OUT/steps.txt")
say "$(wc -l <"$OUT/steps.txt") steps, $failed failed, $(grep -l WRONG "$LOGS"/*.log | wc -l) with wrong launches"
[ "$failed" = 0 ]
