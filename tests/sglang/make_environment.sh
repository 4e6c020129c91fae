#!/usr/bin/env bash
# Makes .venv-sglang, in which `make test-sglang` starts its servers: SGLang, on a CPU, with this checkout's plugin.
# The tests themselves run in .venv, because SGLang pins other versions than this library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
environment=${1:-.venv-sglang}
"${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "${TORCH:-torch==2.14.1}" setuptools
"${pip[@]}" --no-deps -r tests/sglang/requirements.txt
"${pip[@]}" --no-deps --no-build-isolation -e .
