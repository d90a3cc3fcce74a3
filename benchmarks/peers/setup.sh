#!/usr/bin/env bash
# The environments of the peers, apart from ours: TRL's with the same torch and transformers. Run again at will. Two minutes and 1.5 GB.
#   bash benchmarks/peers/setup.sh            into ~/.cache/slime-like-peers; PEERS=/elsewhere and TRL_PYTHON for another place
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PEERS="${PEERS:-${HOME}/.cache/slime-like-peers}"
PYTHON="${PYTHON:-${HERE}/../../.venv/bin/python}"
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
if [[ ! -x "${PEERS}/trl/bin/python" ]]; then "${PYTHON}" -m venv "${PEERS}/trl"; fi
pip_install() { "${PEERS}/trl/bin/python" -m pip --disable-pip-version-check install --quiet "$@" -r "${HERE}/requirements-trl.txt"; }
# Where the configured index has the CPU build of torch, take it.
pip_install || pip_install --extra-index-url "${TORCH_CPU_INDEX}"
"${PEERS}/trl/bin/python" -c 'import torch, transformers, trl; print("trl", trl.__version__, "torch", torch.__version__, "transformers", transformers.__version__)'
