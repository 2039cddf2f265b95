# Sourced in the repository: unpacks carried archives (packs.sh, if any) once, and puts them, this repository and its
# entry point on the path. Needs a python3 with torch. PACKS: where from; SITE: where to; OUT: where results go.
SITE=${SITE:-/tmp/site}
mkdir -p "$SITE"
for pack in "${PACKS:-.packs}"/*.tar.xz; do
  [ -f "$pack" ] || continue
  mark=$SITE/.$(basename "$pack")
  [ -e "$mark" ] || { tar xJf "$pack" -C "$SITE" && touch "$mark"; }
done
export PYTHONPATH=$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages:$PWD PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_KIMI_K3_GEMM_AR=0 HF_HUB_OFFLINE=1
OUT=${OUT:-benchmarks/h200/results}
# what an installation of this checkout would register
python3 - "$SITE" <<'PY'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
info = pathlib.Path(sys.argv[1]) / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
info.mkdir(parents=True, exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
lines = [line for group, names in project["entry-points"].items()
         for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))]
(info / "entry_points.txt").write_text("\n".join(lines) + "\n")
PY
fasttrack() { python3 -c 'import sys; from fasttrack.cli.main import main; sys.exit(main())' "$@"; }
export -f fasttrack
