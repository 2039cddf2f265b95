#!/bin/bash
# Settings search: JOBS is a list of case:rows; PLAN a file of plan.py. Compilation runs in parallel, timing under a lock.
. benchmarks/h200/env.sh
export LIMIT=${LIMIT:-12} DEADLINE=${DEADLINE:-6} PLAN
mkdir -p /tmp/tune
one() {
  IFS=: read -r c m <<<"$1"
  timeout 300 python3 benchmarks/h200/projection.py tune --case $c --rows ${m//,/ } --limit $LIMIT --deadline $DEADLINE ${PLAN:+--plan $PLAN} \
    --out /tmp/tune/$c-m$m.json >/tmp/tune/$c-m$m.log 2>&1
}
export -f one
printf '%s\n' $JOBS | xargs -P ${PAR:-14} -I{} bash -c 'one {}'
grep -h -E "WRONG|FAILED|^compile|Error" /tmp/tune/*.log | head -20
python3 - <<'PY'
import glob, json, os
out = {}
for f in sorted(glob.glob("/tmp/tune/*.json")):
    key = os.path.basename(f)[:-5]
    out[key] = rows = json.load(open(f))
    best = sorted(((us, k, r) for r in rows for k, us in r["us"].items() if r["excess"] <= 1), key=lambda t: t[0])
    bad = [r for r in rows if r["excess"] > 1 or "error" in r]
    for us, k, r in best[:1]:
        print(f"{key:36s} {len(rows):3d} {len(bad)} {us:7.2f} {k:8s}", [r[a] for a in ("kind", "rows", "stages", "ksplit", "kblk", "warps", "wm", "wk", "xstages", "xcast", "prompt", "l2")])
json.dump({"results": out}, open(os.environ["OUT"] + "/tune.json", "w"))
PY
