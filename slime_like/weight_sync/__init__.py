"""Moves weights from the trainer to the engines, versioned.

`session` is one sync from begin to continue (no torch: the driver makes its order).
"""
