"""Places and starts: the only package that knows Ray."""
