"""Megatron checkpoints: folders, what is in them, reading without executing, writing while the run goes on."""
