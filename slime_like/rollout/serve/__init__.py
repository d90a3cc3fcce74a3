"""An endpoint for agents that are not ours: they play against the policy in OpenAI's language, and we record."""
