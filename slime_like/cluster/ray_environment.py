"""Which Ray cluster a run joins, and the environment for one of its own. Must be settled before ray is imported."""

from __future__ import annotations

import os
import secrets
import socket


def prepare_ray_environment() -> None:
    """Protect the cluster that this process is about to start, if it will start one; call before the first `import ray`.

    Ray 2.60 listens on every interface even when told 127.0.0.1, and reads its authentication settings once, at import.
    """
    if running_cluster() is None and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # do not empty CUDA_VISIBLE_DEVICES for actors without a GPU


def running_cluster() -> str | None:
    """The cluster to join: RAY_ADDRESS (which `ray job submit` sets), else the one that `ray start` left on this host.

    None: start a local one; RAY_ADDRESS=local asks for that even beside a running cluster.
    """
    told = os.environ.get("RAY_ADDRESS")
    if told:
        return None if told == "local" else told
    return _recorded_cluster()


def _recorded_cluster() -> str | None:
    """host:port that `ray start` wrote down, if something still listens there."""
    record = os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if not os.path.exists(record):
        return None
    with open(record, encoding="utf-8") as file:
        address = file.read().strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except (OSError, ValueError):
        return None
    return address
