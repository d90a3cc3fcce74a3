# Sourced by scripts/run_example.sh: rows, and a tiny model that has seen the tool being used, among other things.
PYTHON="${PYTHON}" bash scripts/examples/calculator/warm_up.sh runs/tiny/calculator-seed0
