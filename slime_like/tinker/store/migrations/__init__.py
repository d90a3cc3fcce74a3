"""How the tables came about, for alembic; `versions/` has one file a change."""
