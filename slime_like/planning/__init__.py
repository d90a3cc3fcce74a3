"""Thinks before anything starts: which role sits on which GPUs. Pure, no machines."""
