#!/bin/bash
# What a machine without package registries needs besides Python 3.12, torch and a usual scientific stack, as archives
# of unpacked wheels for CPython 3.12 on Linux x86-64, in the versions of constraints.txt:
#   harness.tar.xz  pydantic and what it needs (typer, rich, PyYAML, SciPy, Jinja2 and NumPy are taken to be there)
#   tests.tar.xz    what the test modules import besides (lm-eval, openai, FastAPI, xgrammar), so that all are collected
#   cutlass.tar.xz  CuTe DSL for CUDA 13
# packs.sh [harness|tests|cutlass|all] [OUTDIR, default .packs].  env.sh unpacks every .packs/*.tar.xz once.
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-harness} out=$(mkdir -p "${2:-.packs}" && cd "${2:-.packs}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pinned() { grep -iE "^$(tr _- '..' <<<"$1")==" constraints.txt || { echo "$1 is not in constraints.txt" >&2; exit 1; }; }
pack() { # NAME REQUIREMENT...
  local name=$1
  shift
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    $(for n in 17 24 26 27 28 31 34; do echo --platform manylinux_2_${n}_x86_64; done) \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$work/$name.whl" "$@"
  [ -z "${source:-}" ] || python3 -m pip wheel -q --no-deps -w "$work/$name.whl" $source
  for wheel in "$work/$name.whl"/*.whl; do python3 -m zipfile -e "$wheel" "$work/$name"; done
  find "$work/$name" \( -iname '*iket*' -o -iname '*profiler*' \) -prune -exec rm -rf {} +
  tar cf - -C "$work/$name" . | xz -T1 --lzma2=preset=9e,dict=256MiB >"$out/$name.tar.xz"
  echo "$out/$name.tar.xz: $(stat -c %s "$out/$name.tar.xz") bytes, $*"
}
all() { for p in "$@"; do pinned "$p"; done; }
if [ "$what" = harness ] || [ "$what" = all ]; then
  pack harness $(all pydantic pydantic_core typing-inspection annotated-types)
fi
if [ "$what" = tests ] || [ "$what" = all ]; then
  # no wheels of these are published; they are pure Python
  source=$(all rouge_score sqlitedict word2number) pack tests $(
    all lm_eval tenacity datasets dill multiprocess evaluate more-itertools nltk chardet pytablewriter dataproperty \
      mbstrdecoder pathvalidate tabledata tcolorpy typepy pytz openai httpx2 httpcore2 truststore opentelemetry-api \
      jiter sniffio fastapi starlette uvicorn xgrammar apache-tvm-ffi
  )
fi
if [ "$what" = cutlass ] || [ "$what" = all ]; then
  dsl=$(pinned nvidia-cutlass-dsl)
  pack cutlass "$dsl" "$(pinned nvidia-cutlass-dsl-libs-base)" "$(pinned nvidia-cutlass-dsl-libs-core)" \
    "nvidia-cutlass-dsl-libs-cu13==${dsl#*==}"
fi
