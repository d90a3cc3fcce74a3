"""Drives: the phases of a step and the loops over them."""
