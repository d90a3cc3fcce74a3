"""That engines hold what was sent: digests in their own layout, and log-probs of fixed prompts."""
