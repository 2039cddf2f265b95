#!/bin/bash
# Deep-ring search for many rows, then with the best settings of all searches: timings, repeated launches, tests, sanitizer.
. benchmarks/h200/env.sh
export OUT PYTHONUNBUFFERED=1
R=benchmarks/h200/results
C="tp8-kda_in_proj tp16-kda_in_proj tp8-mla_in_proj tp16-mla_in_proj tp8-o_proj tp8-shared_down tp8-dense_gate_up tp8-dense_down tp8-lm_head"
export AGAIN=$(ls $R/projection_search_*.json)
JOBS=$(for m in 16 64 8 32; do for c in $C; do echo kimi-k3-$c:$m; done; done); export JOBS
LIMIT=8 DEADLINE=3 timeout 75 bash benchmarks/h200/tune.sh | cut -c1-110
mv $OUT/tune.json $OUT/projection_search_5.json; unset AGAIN; rm -rf /tmp/tune
JOBS=$(for m in 64 32; do for c in tp8-kda_in_proj tp16-kda_in_proj tp8-mla_in_proj tp8-o_proj tp8-dense_gate_up tp8-dense_down tp8-lm_head; do echo kimi-k3-$c:$m; done; done); export JOBS
DEEP=1 LIMIT=8 DEADLINE=2 timeout 45 bash benchmarks/h200/tune.sh | cut -c1-110
mv $OUT/tune.json $OUT/projection_search_6.json
python3 benchmarks/h200/choose.py $R/projection_search_*.json $OUT/projection_search_5.json $OUT/projection_search_6.json --apply && cp kimi_k3/kernels/stream_projection_settings.py $OUT/settings.py.txt
P="timeout 200 python3 benchmarks/h200/projection.py"
$P floor | tee $OUT/floor.json | cut -c1-120
F=$(python3 -c "import json;print(json.load(open('$OUT/floor.json'))['read_floor_TBps'])")
mkdir -p /tmp/t
one() { timeout 200 python3 benchmarks/h200/projection.py time --case $1 --rows 1 2 4 8 16 32 64 --floor $F --replays 60 --out /tmp/t/time_$1.json >/tmp/t/time_$1.log 2>&1; }
chk() { timeout 200 python3 benchmarks/h200/projection.py check --case $1 --rows $2 --launches $3 --out /tmp/t/check_$1.json >/tmp/t/check_$1.log 2>&1; }
export -f one chk; export F
FULL=$(for c in tp8-kda_in_proj tp8-mla_in_proj tp8-mla_q_b tp8-o_proj tp8-moe_front tp8-shared_gate_up tp8-shared_down tp8-dense_gate_up tp8-dense_down tp8-lm_head tp16-kda_in_proj tp16-mla_in_proj tp16-mla_q_b tp16-moe_front tp16-shared_gate_up tp16-shared_down tp16-dense_gate_up tp16-dense_down tp16-lm_head; do echo kimi-k3-$c; done)
printf '%s\n' $FULL | xargs -P 10 -I{} bash -c 'one {}'
python3 benchmarks/h200/collect.py time /tmp/t/time_*.json $OUT/projection.json $OUT/floor.json
[ -n "$SHORT" ] && exit
(timeout 100 compute-sanitizer --tool memcheck python3 benchmarks/h200/projection.py check --case small-tp8-moe_front --rows 1 8 16 64 2>&1 | tail -3
 timeout 100 compute-sanitizer --tool synccheck python3 benchmarks/h200/projection.py check --case small-tp8-shared_gate_up --rows 1 8 16 64 2>&1 | tail -3) >$OUT/sanitizer.log 2>&1 &
printf '%s\n' $FULL | xargs -P 8 -I{} bash -c 'chk {} "1 8 16 32 64" 5000'
grep -h WRONG /tmp/t/*.log | head -5; tail -qn1 /tmp/t/check_*.log | cut -c1-150
python3 benchmarks/h200/collect.py check /tmp/t/check_*.json $OUT/projection_checks.json $OUT/floor.json
timeout 150 python3 -m pytest -q -m gpu -p no:cacheprovider tests/kimi_k3/kernels/test_stream_projection_gpu.py 2>&1 | tail -8
wait; cat $OUT/sanitizer.log
