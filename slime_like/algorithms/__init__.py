"""The arithmetic of policy optimisation: pure functions that know neither Megatron nor Ray."""
