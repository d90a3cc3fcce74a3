"""The chaos matrix: faults put into whole runs of train.py from outside, and what comes of each (scripts/chaos.sh)."""
