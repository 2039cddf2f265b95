# Sourced: puts the CuTe DSL of a carried archive (if any) and this repository on the path. Needs a python3 with torch.
SITE=${SITE:-/tmp/site}
if [ -f .packs/cutlass.tar.xz ] && [ ! -d "$SITE/nvidia_cutlass_dsl" ]; then
  mkdir -p "$SITE" && tar xJf .packs/cutlass.tar.xz -C "$SITE"
fi
export PYTHONPATH=$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages:$PWD PYTHONUNBUFFERED=1
OUT=${OUT:-benchmarks/h200/results}
