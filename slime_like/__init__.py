"""slime_like: Megatron-native RL training whose whole stack also runs, unpatched, on a CPU."""

__version__ = "0.1.0"
