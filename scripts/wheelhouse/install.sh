#!/usr/bin/env bash
# Installs this wheelhouse without a network: digests are checked first, then pip takes the wheels from here alone.
#   bash install.sh --venv DIR        into DIR (made if it is not there; sees the host's own packages if torch is to come from the host)
#   bash install.sh                   into the interpreter itself
#   bash install.sh --verify-only     only says whether everything is there and intact
# PYTHON=/path/to/python chooses the interpreter; otherwise @PYTHON@ or python3 on the PATH.
set -euo pipefail

find_python() {
  local candidate
  for candidate in @PYTHON@ python3; do
    # A name on the PATH may be a shim for an interpreter that is not there: ask it.
    if "${candidate}" -c '' 2>/dev/null; then command -v "${candidate}"; return; fi
  done
  printf 'install: no @PYTHON@ on the PATH. Fix: PYTHON=/path/to/@PYTHON@ bash install.sh\n' >&2
  exit 2
}

PYTHON="${PYTHON:-$(find_python)}"
exec "${PYTHON}" "$(dirname "${BASH_SOURCE[0]}")/install.py" "$@"
