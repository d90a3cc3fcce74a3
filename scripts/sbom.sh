#!/usr/bin/env bash
# Lists what .venv holds, as an SBOM (CycloneDX 1.6, JSON), and with --advisories the known advisories of it.
#   bash scripts/sbom.sh [FILE]                 default: sbom.cdx.json
#   bash scripts/sbom.sh --advisories           from PyPI, or another service: --advisories --vulnerability-service osv
# The tools get a virtual environment of their own, which is removed: they are no part of what is listed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${SLIME_LIKE_VENV:-.venv}"
[[ -x "${VENV}/bin/python" ]] || { printf 'sbom: no %s. Fix: bash scripts/setup.sh\n' "${VENV}" >&2; exit 2; }

tools=$(mktemp -d)
trap 'rm -rf "${tools}"' EXIT
install_tool() {
  "${VENV}/bin/python" -m venv "${tools}/venv"
  "${tools}/venv/bin/python" -m pip --disable-pip-version-check install --quiet "$1"
}

if [[ "${1:-}" == --advisories ]]; then
  shift
  install_tool pip-audit==2.10.1
  "${VENV}/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable >"${tools}/packages.txt"
  # --strict: a package that the service does not know is a failure, not a silent gap. A build such as +cpu is no version that a list of advisories knows.
  sed -i -E 's/(==[^+ ]+)\+[A-Za-z0-9.]+/\1/' "${tools}/packages.txt"
  exec_status=0
  "${tools}/venv/bin/pip-audit" --requirement "${tools}/packages.txt" --no-deps --disable-pip --strict --progress-spinner off "$@" || exec_status=$?
  exit "${exec_status}"
fi
install_tool cyclonedx-bom==7.5.0
"${tools}/venv/bin/cyclonedx-py" environment "${VENV}/bin/python" --spec-version 1.6 --output-reproducible --output-file "${1:-sbom.cdx.json}" --of JSON
printf 'sbom: %s\n' "${1:-sbom.cdx.json}"
