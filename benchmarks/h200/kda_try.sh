#!/bin/bash
# KDA core: tests, a sweep of settings, profiles. About two minutes.
. benchmarks/h200/env.sh
timeout 150 python3 -m pytest -q -m gpu -n 10 --maxfail=12 -p no:cacheprovider tests/kimi_k3/kernels/test_kda_core_gpu.py tests/kimi_k3/kernels/test_attn_res_gpu.py >$OUT/tests.txt 2>&1
tail -n 25 $OUT/tests.txt | cut -c1-200
timeout 150 python3 -m benchmarks.h200.kda_core --sweep --rows ${ROWS:-1 8 16 64} --out $OUT/kda_sweep.json > $OUT/sweep.txt 2>&1
grep -v "^case" $OUT/sweep.txt | awk '{k=$2" "$3; if(n[k]++<5) print}' | cut -c1-110
for c in "12 64" "6 16"; do set -- $c
timeout 60 ncu --clock-control none -k regex:k3_kda -c 1 --launch-skip 1 --set detailed --section SourceCounters --section WarpStateStats python3 -m benchmarks.h200.kda_core --heads $1 --rows $2 --out /tmp/x.json > $OUT/ncu_$1_$2.txt 2>&1
done
grep -E "Duration|Registers Per|Achieved Occ|Theoretical Occ|DRAM Throughput|Elapsed Cycles|Issue Slots Busy|L2 Hit|Memory Throughput|Block Limit|No Eligible" $OUT/ncu_*.txt | cut -c1-130
