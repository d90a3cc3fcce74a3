"""Where the ranks of a process group find each other: torch's stores, open to no more than they must be.

torch's own TCPStore listens on every interface and asks for no key: whoever reaches it reads, sets and deletes every
key, and learns where ranks listen. Here it listens at one address. It still has no key: where all ranks are on one
machine, a file in a private folder takes its place.
"""

from __future__ import annotations

import datetime
import socket

from torch.distributed import FileStore, HashStore, Store, TCPStore

from slime_like.utils.net import listen_at


def serve_store(listener: socket.socket, *, timeout_s: float, world_size: int | None = None) -> TCPStore:
    """A store for those who connect to `listener` (of net.listen_at), which it takes over.

    world_size: wait until so many have, this process counted.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, world_size, is_master=True, wait_for_workers=world_size is not None,
        timeout=datetime.timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
    )  # fmt: skip


def meet_at_address(host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> Store:
    """The store of rank 0, at its address.

    Raises OSError if rank 0 cannot listen there, DistError if it is not reached.
    """
    if rank == 0:
        return serve_store(listen_at(host, port), timeout_s=timeout_s, world_size=world_size)
    return join_store(host, port, timeout_s=timeout_s, world_size=world_size)


def join_store(host: str, port: int, *, timeout_s: float, world_size: int | None = None) -> TCPStore:
    """The store that somebody else serves."""
    return TCPStore(
        host,
        port,
        world_size,
        is_master=False,
        wait_for_workers=world_size is not None,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def meet_in_file(path: str, *, world_size: int, timeout_s: float) -> Store:
    """A file for the ranks of one machine, in a folder that nobody else enters; it must stay as long as the groups.

    One rank needs none.
    """
    store = FileStore(path, world_size) if world_size > 1 else HashStore()
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store
