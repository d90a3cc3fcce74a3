"""Moves weights from the trainer to the engines, versioned. `envelope` is the driver's side (no torch), the others the trainer's."""
