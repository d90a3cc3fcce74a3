"""What runs inside an engine's processes: needs the standard library and torch alone."""
