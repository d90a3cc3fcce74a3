"""HF names and files: a table for each family, used for loading, exporting and saving."""
