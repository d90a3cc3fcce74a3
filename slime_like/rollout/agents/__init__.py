"""Many turns with an environment: the conversation as a tree of tokens that are sent as they were sampled."""
