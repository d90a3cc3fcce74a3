"""What alembic runs for every command: the migrations, on the connection that database.upgrade has opened."""

from __future__ import annotations

from alembic import context

from slime_like.tinker.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter most of a table in place
)
with context.begin_transaction():
    context.run_migrations()
