"""What a run did: metrics, the console line, the reward curve."""
