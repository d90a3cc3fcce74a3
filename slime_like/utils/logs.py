"""How loud our own loggers are: one level in the driver and in every process that it starts."""

from __future__ import annotations

import logging

from slime_like.utils.full_disk import lose_output_when_full

#: What --log-level takes, the most talkative first.
LOG_LEVELS = ("debug", "info", "warning", "error")

#: For files; a console has no use for the time.
FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_logging(level: str | None = None, *, line_format: str = FILE_FORMAT) -> None:
    """Send log records to standard error: ours from `level` on (None: warning), those of other packages from warning
    on.

    May be called again with another level; the format of the first call stays. Output that has no room is lost from
    now on (utils/full_disk.py).
    """
    lose_output_when_full()
    logging.basicConfig(level=logging.WARNING, format=line_format)
    logging.getLogger("slime_like").setLevel((level or "warning").upper())
