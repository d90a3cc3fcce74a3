"""A reward model: an HF sequence classifier with one output that scores whole samples.

Knows nothing of Ray or Megatron.
"""
