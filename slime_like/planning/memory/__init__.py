"""Bytes on every GPU in every phase."""
