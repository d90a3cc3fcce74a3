"""What became of a run that goes on, hangs, was killed or has ended, and what to do:
`python -m slime_like.observability.doctor RUN_DIR`.
"""
