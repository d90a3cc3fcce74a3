"""Who is served next, in which order, and what a model's state is after a crash.

entries: a call under way, its cost and who waits for it. call_book: all of them, in the database and in memory; limits.
ordering: a model's calls by seq_id. registry: the models that have calls. fair_clock: whose turn it is.
residency: which models the trainer holds; snapshots, and what is repeated after them. verbs: what each call does.
training_lane: one call at a time for the trainer, or passes of several models. sampling_lane: many samples at once.
sweeper: what time does. folders: weights on a disk, or wherever fsspec reaches.
"""
