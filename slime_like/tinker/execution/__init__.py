"""Who is served next, in which order, and what a model's state is after a crash.

entries         a call under way -> its cost, who waits for it
ledger          all calls under way: the database and the memory's view of it; limits
ordering        a model's calls, in the order of their seq_id
fair_clock      whose turn it is
residency       which models the trainer holds; snapshots, repeats
training_lane   one call at a time for the trainer, or passes of several models
sampling_lane   many samples at once for the engines
sweeper         what time does: gaps, idle sessions, expired checkpoints
"""
