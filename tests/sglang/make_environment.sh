#!/usr/bin/env bash
# Makes .venv-sglang with SGLang, for a CPU, and this checkout, in which `make test-sglang` runs. TORCH may name a wheel
# of the CPU's build, which takes 3 GB less.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
environment=${1:-.venv-sglang}
"${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "${TORCH:-torch==2.14.1}" setuptools
"${pip[@]}" --no-deps -r tests/sglang/requirements.txt
"${pip[@]}" --constraint tests/sglang/requirements.txt --no-build-isolation -e . pytest pytest-xdist hypothesis "bitsandbytes==0.50.2"
