#!/bin/bash
# One command for a GPU machine, about five minutes on an H200 with 16 cores: GPU tests and repeated launches (in
# parallel, compilation takes longest), then timings beside torch.mm with the GPU to themselves. Results in $OUT.
#   ROWS="1 8 64" LAUNCHES=500   for a shorter run        SANITIZE=1   also memcheck and synccheck
. benchmarks/h200/env.sh
export OUT LAUNCHES=${LAUNCHES:-5000} ROWS=${ROWS:-1 2 4 8 16 32 64} LOGS=/tmp/final
mkdir -p "$OUT" $LOGS
say() { echo "[$SECONDS s] $*"; }
CASES=$(for tp in 8 16; do
  for op in kda_in_proj mla_in_proj mla_q_b o_proj moe_front shared_gate_up shared_down dense_gate_up dense_down lm_head; do
    echo kimi-k3-tp$tp-$op
  done
done)

tests() { # NAME FILE EXPRESSION: the GPU tests of a file that match; the machine need not have the project's pytest plugins
  timeout 200 python3 -m pytest -o addopts= -q -m gpu -p no:cacheprovider --tb=short "$2" ${3:+-k "$3"} >$LOGS/tests-"$1".log 2>&1
  local code=$?
  echo "$1: $(tail -n1 $LOGS/tests-"$1".log) (exit $code)" | tee $LOGS/tests-"$1".line
}
check() { # CASE: errors, and every setting's launches compared bit by bit
  timeout 150 python3 benchmarks/h200/projection.py check --case "$1" --rows 1 8 16 32 64 --launches "$LAUNCHES" \
    --out $LOGS/check-"$1".json >$LOGS/check-"$1".log 2>&1 || echo "check $1: exit $?"
  grep -h WRONG $LOGS/check-"$1".log
}
times() { # CASE
  timeout 150 python3 benchmarks/h200/projection.py time --case "$1" --rows $ROWS --floor "$FLOOR" --replays 60 \
    --out $LOGS/time-"$1".json >$LOGS/time-"$1".log 2>&1 || echo "time $1: exit $?"
}
export -f tests check times

P=tests/kimi_k3/kernels/test_stream_projection_gpu.py K=tests/kimi_k3/kernels/test_kda_core_gpu.py
S=tests/kimi_k3/decode/test_shard_cases_gpu.py
{
  echo "tests shard-tp8 $S 'tp8-'"
  echo "tests shard-tp16 $S 'tp16-'"
  echo "tests kda-geometry-coded $K 'every_geometry and coded'"
  echo "tests kda-geometry-adversarial $K 'every_geometry and adversarial'"
  echo "tests kda-batches $K shards_and_batches"
  echo "tests kda-replays $K replays"
  echo "tests kda-rest $K 'not every_geometry and not shards_and_batches and not replays'"
  echo "tests projection-tp8 $P 'within_limits and kimi-k3-tp8'"
  echo "tests projection-tp16 $P 'within_limits and kimi-k3-tp16'"
  echo "tests projection-small $P 'within_limits and small'"
  echo "tests projection-rest $P 'not within_limits and not brings_weights'"
  echo "tests attn-res tests/kimi_k3/kernels/test_attn_res_gpu.py"
  for c in $CASES; do echo "check $c"; done
} | tr '\n' '\0' | xargs -0 -P "${JOBS:-14}" -I{} bash -c '{}'
tests prefetch $P brings_weights # compares times: alone
python3 benchmarks/h200/projection.py floor >"$OUT"/floor.json || exit 1
python3 benchmarks/h200/collect.py check $LOGS/check-*.json "$OUT"/projection_checks.json "$OUT"/floor.json
cat $LOGS/tests-*.line >"$OUT"/gpu_tests.txt
grep -hE "^(FAILED|ERROR|E  )" $LOGS/tests-*.log | head -40 | tee -a "$OUT"/gpu_tests.txt
say "correctness done"

FLOOR=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["read_floor_TBps"])' "$OUT"/floor.json)
export FLOOR
printf '%s\n' $CASES | xargs -P 10 -I{} bash -c 'times {}'
python3 benchmarks/h200/collect.py time $LOGS/time-*.json "$OUT"/projection.json "$OUT"/floor.json
say "projections timed"
timeout 120 python3 benchmarks/h200/kda_core.py --out "$OUT"/kda_core_times.json --rows $ROWS --verify 4 8 >$LOGS/kda.log 2>&1
grep -E "kda_core|Error" $LOGS/kda.log
timeout 60 python3 benchmarks/h200/attn_res.py --out "$OUT"/attn_res_times.json --rows $ROWS >$LOGS/attn_res.log 2>&1
grep -E "attn_res|Error" $LOGS/attn_res.log
say "all timed"
[ -n "$SANITIZE" ] || exit 0
for c in small-tp8-moe_front:memcheck small-tp8-shared_gate_up:synccheck; do
  timeout 100 compute-sanitizer --tool "${c#*:}" python3 benchmarks/h200/projection.py check --case "${c%:*}" --rows 1 8 16 64 2>&1 |
    tail -n 3 | sed "s/^/$c: /"
done | tee "$OUT"/sanitizer.log
say "sanitizer done"
