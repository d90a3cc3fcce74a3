"""The routes, one file a face."""
