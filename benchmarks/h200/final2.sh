#!/bin/bash
# The evidence run on an H200 in one command of less than ten minutes: numerics of a rank's shard served by the kernels,
# and every kernel's time beside the read floor and a library's kernel (vLLM's, where it is on the path), through the
# harness; then the bundle, verified. A run that is cut off goes on where it stopped when this is called again on the
# same machine.
#   HEAD=commit PR=number REPO=owner/name   what the bundle is about   TIER=standard   RUN=runs/h200-shard
cd "$(dirname "$0")/../.." || exit 2
. benchmarks/h200/env.sh
MINUTES=${MINUTES:-9}
. benchmarks/h200/steps.sh
export OUT
mkdir -p "$OUT"
run=${RUN:-runs/h200-shard} tier=${TIER:-standard} manifest=${MANIFEST:-configs/kimi-k3-h200-shard.yaml}
head=${HEAD:-$(git rev-parse HEAD 2>/dev/null)}

step plan 60 bash -c "fasttrack plan $manifest --tier $tier --check numerics,performance"
step validate "${LIMIT:-500}" bash -c "fasttrack validate $manifest --tier $tier --check numerics,performance \
  --run $run ${head:+--head $head}"
code=$?
tail -n 40 "$LOGS/validate.log"
tar czf "$OUT/run.tar.gz" -C "$(dirname "$run")" "$(basename "$run")"
[ $code = 124 ] && say "cut off: call this again on the same machine, or take what is in run.tar.gz"
if [ $code = 0 ] || [ $code = 1 ] || [ $code = 3 ]; then
  rm -rf "$LOGS/bundles"
  step bundle 60 bash -c "fasttrack bundle --run $run --out $LOGS/bundles --pr ${PR:-1} ${REPO:+--repo $REPO} \
    ${head:+--head $head}" &&
    step verify 60 bash -c "fasttrack verify $LOGS/bundles/*/" &&
    step show 60 bash -c "fasttrack show $LOGS/bundles/*/" &&
    tar czf "$OUT/bundle.tar.gz" -C "$LOGS/bundles" .
  cp "$LOGS/show.log" "$OUT/show.txt" 2>/dev/null
fi
tar czf "$OUT/logs2.tar.gz" --exclude bundles -C "$LOGS" .
say "exit $code"
exit $code
