#!/bin/bash
# Does everything compile, run and agree here, and what is the floor? About a minute.
time . benchmarks/h200/env.sh
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader
P="timeout 150 python3 benchmarks/h200/projection.py"
time $P floor 2>&1 | tail -5
for c in kimi-k3-tp8-kda_in_proj kimi-k3-tp8-o_proj kimi-k3-tp8-moe_front kimi-k3-tp8-shared_gate_up small-tp16-shared_down kimi-k3-tp16-o_proj; do
  $P check --case $c --rows 1 3 8 13 16 32 64 --launches 200 --out $OUT/check_$c.json >$OUT/log_check_$c 2>&1 &
done
wait
tail -n 3 $OUT/log_check_*
for c in kimi-k3-tp8-kda_in_proj kimi-k3-tp8-o_proj; do
  $P time --case $c --rows 1 8 16 32 64 --floor 4.37 --replays 21 --out $OUT/time_$c.json 2>&1 | tail -14 &
done
wait
mkdir -p $OUT/logs; cat $OUT/log_check_* > $OUT/logs.txt; rm -f $OUT/log_check_*; cat $OUT/check_*.json > $OUT/checks.json; rm -f $OUT/check_*.json
