"""A run as one thing: its phases, written once over three protocols, and how its parts are put together from a config
and a plan.
"""
