"""Rewards: the built-in ones, a user's own function, and the processes that keep a stuck scorer
from stopping the run.
"""
