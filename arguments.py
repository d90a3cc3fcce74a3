"""Command line -> RunConfig, for train.py and who else takes its flags (slime_like/job/command_line.py)."""

from slime_like.job.command_line import Command, build_parser, parse_args

__all__ = ["Command", "build_parser", "parse_args"]
