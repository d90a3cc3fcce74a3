"""What a step will take before it is run: generation, training and syncs on a simulated clock, in each async mode."""
