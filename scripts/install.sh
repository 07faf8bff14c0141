#!/usr/bin/env bash
# Create .venv and install sdpo into it, with a CPU build of torch on a machine without a GPU.
#   scripts/install.sh [EXTRAS]      default extras: dev
# PYTHON chooses the interpreter, SDPO_TORCH what to ask pip for instead of the tested torch.
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-dev}"
python="${PYTHON:-python3}"
torch="${SDPO_TORCH:-torch==2.13.0}"
cpu_index="https://download.pytorch.org/whl/cpu"
stamp=".venv/.installed-$extras"

die() { echo "install: $1" >&2; exit 2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed; set PYTHON"
[ -f "$stamp" ] && [ "$stamp" -nt pyproject.toml ] && exit 0
[ -x .venv/bin/python ] || "$python" -m venv .venv || die "this Python lacks venv (Debian: apt install python3-venv)"
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; }

# What pip would install, without downloading it: a CUDA build brings nvidia-* packages of several gigabytes.
resolves_without_cuda() {
  pip install --dry-run --report .venv/torch.json "$@" 2>/dev/null &&
    .venv/bin/python - <<'PY'
import json
import sys

names = [item["metadata"]["name"].lower() for item in json.load(open(".venv/torch.json"))["install"]]
sys.exit(any(name.startswith(("nvidia-", "cuda-", "triton")) for name in names))
PY
}

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  if has_gpu; then
    pip install 'torch>=2.9'
  elif resolves_without_cuda "$torch"; then
    pip install "$torch"
  elif resolves_without_cuda 'torch>=2.9' --index-url "$cpu_index"; then
    pip install 'torch>=2.9' --index-url "$cpu_index"
  else
    die "no CPU build of torch can be had; set SDPO_TORCH to one (a wheel's path or a requirement)"
  fi
fi
pip install -e ".[$extras]"
has_gpu || .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' ||
  die "torch in .venv is a CUDA build, though this machine has no GPU; remove .venv and run again"
touch "$stamp"
