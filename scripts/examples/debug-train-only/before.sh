# Sourced by scripts/run_example.sh: the samples to train on come from the other example.
if ! compgen -G "runs/debug-samples/*.npz" >/dev/null; then bash scripts/run_example.sh debug-rollout-only; fi
