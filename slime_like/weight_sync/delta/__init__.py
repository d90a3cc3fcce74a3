"""Only what changed travels: how it is written, sent, kept beside an engine and applied."""
