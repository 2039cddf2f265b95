#!/bin/bash
# KDA core and attention residual: tests of every geometry, sweep and timing, steps left out, profiles. Three minutes.
. benchmarks/h200/env.sh
K="python3 -m benchmarks.h200.kda_core"
timeout 45 python3 -m pytest -q -m gpu -n 14 --maxfail=12 -p no:cacheprovider -p no:warnings -k "every_geometry or verify_chain or 32_bits" tests/kimi_k3/kernels/test_kda_core_gpu.py >$OUT/tests.txt 2>&1
grep -v -i benchmark $OUT/tests.txt | tail -n 6 | cut -c1-200
(timeout 95 $K --sweep --rows 64 16 1 8 32 4 2 --out $OUT/kda_sweep.json) > $OUT/sweep.txt 2>&1
grep -v "^case" $OUT/sweep.txt | awk '{k=$2" "$3; if(n[k]++<4) print}' | cut -c1-110
timeout 25 python3 -m benchmarks.h200.attn_res --out $OUT/attn_res.json 2>&1 | grep -v "^case" | cut -c1-100
timeout 30 $K --sweep --verify 8 4 --plain 0 --heads 12 6 --rows 8 16 64 --out $OUT/kda_verify.json 2>&1 | grep -v "^case" | cut -c1-110
timeout 16 $K --ablate --heads 12 --rows 64 --out $OUT/ablate.json 2>&1 | grep -v "^case" | cut -c1-110
timeout 14 $K --ablate --heads 6 --rows 16 --out $OUT/ablate6.json 2>&1 | grep -v "^case" | cut -c1-110
timeout 14 ncu --clock-control none -k regex:k3_kda -c 1 --launch-skip 1 --section SourceCounters --page source --csv $K --heads 6 --rows 16 --out /tmp/x.json > $OUT/ncu.txt 2>&1
