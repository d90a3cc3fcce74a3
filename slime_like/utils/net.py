"""Ports, addresses, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from slime_like.errors import ConfigError, EngineError, WaitTimeout

_T = TypeVar("_T")

#: Where free_port looks: below the ports that Linux gives to outgoing connections (32768 and up), one of which could
#: take the port between our look and the server's bind.
_PORTS = range(20000, 32000)
#: Connections that may wait to be taken: all ranks of a large run call at once.
_BACKLOG = 4096


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at `host` now, chosen at random so that two who ask at once rarely get the same."""
    for port in random.sample(_PORTS, 200):
        if port_is_free(host, port):
            return port
    raise OSError(f"no free port found at {host} between {_PORTS.start} and {_PORTS.stop}")


def with_another_port(launch: Callable[[], _T], *, port_given: bool) -> _T:
    """What `launch` gives. Where somebody took the free port before the server could, launch again with another, twice.

    port_given: the user chose the port, so there is no other. Status 3 is uvicorn's word for a port that it could not
    bind.
    """
    for _ in range(2):
        try:
            return launch()
        except EngineError as error:
            if port_given or not any(
                sign in str(error).lower() for sign in ("address already in use", "ended with status 3")
            ):
                raise
    return launch()


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen at `host`:`port`."""
    with _bindable(host) as bound:
        # as servers do: a closing connection does not count
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen(1)
        except OSError:
            return False
    return True


def listener_uids(port: int) -> set[int] | None:
    """The users whose processes listen on a TCP port of this machine, at whatever address.

    None where the system does not say (no Linux).
    """
    uids: set[int] = set()
    tables = [path for path in ("/proc/net/tcp", "/proc/net/tcp6") if os.path.exists(path)]
    for path in tables:
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file]
        # sl local_address rem_address st tx:rx tr:when retrnsmt uid …; 0A is LISTEN.
        uids.update(int(row[7]) for row in rows[1:] if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port)
    return uids if tables else None


def listen_at(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at `host`:`port` and at no other address of this machine; port 0: a free one.

    Raises OSError.
    A name that means the loopback interface only here (Debian's 127.0.1.1 for the machine's own name) stands for the
    address that others see.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if host != "localhost" and is_loopback(str(address[0])) and not is_loopback(host):
        return listen_at(own_address(), port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bindable(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.socket(family, socket.SOCK_STREAM)


def host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int) -> str:
    """`http://host:port`, an IPv6 host in brackets."""
    return f"http://{host_port(host, port)}"


def engine_url(address: str) -> str:
    """`host:port` or a URL -> a URL without a trailing slash (IPv6 hosts in brackets). Raises ValueError."""
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address!r} is no host:port or http(s) URL")
    if parts.port is None and "://" not in address:
        raise ValueError(f"{address!r} has no port")
    return url.rstrip("/")


def url_host(url: str) -> str:
    """The host of a URL, without brackets."""
    host = urlsplit(url).hostname
    if not host:
        raise ValueError(f"{url!r} has no host")
    return host


def certificates() -> str | None:
    """The file or folder of certificates that the user trusts for https, from REQUESTS_CA_BUNDLE or SSL_CERT_FILE.

    None: the usual ones.
    """
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or None


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_own_address(host: str) -> bool:
    """Whether `host` names this machine: a server could listen there."""
    try:
        with _bindable(host) as bound:
            bound.bind((host, 0))
    except OSError:
        return False
    return True


def own_address(peer: str = "192.0.2.1") -> str:
    """The address of this machine that `peer` (an address or a name) would see; the loopback one without a network.

    Nothing is sent.
    """
    try:
        family, *_, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return "::1" if ":" in peer else "127.0.0.1"


def interface_of(address: str) -> str | None:
    """Name of the network interface that holds `address`, or None if no interface of this machine does (Linux)."""
    if is_loopback(address):
        return "lo"
    if ":" in address:
        return _interface_of_ipv6(address)
    return next((name for name, own in _interfaces().items() if own == address), None)


def _interfaces() -> dict[str, str]:
    """Name -> IPv4 address of each interface that has one (Linux)."""
    import fcntl
    import struct

    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(packed[20:24])
    return addresses


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface of this machine (Linux).

    Raises ConfigError listing those that have one.
    """
    addresses = _interfaces()
    if name not in addresses:
        listed = ", ".join(f"{known} ({address})" for known, address in addresses.items())
        raise ConfigError(
            [
                (
                    f"--update-weight-interface {name}: {socket.gethostname()} has no such interface with an IPv4"
                    f" address. It has: {listed}."
                )
            ]
        )
    return addresses[name]


def _interface_of_ipv6(address: str) -> str | None:
    target = ipaddress.ip_address(address.split("%")[0])
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, *_, name = line.split()
                if int(digits, 16) == int(target):
                    return name
    return None


def wait_until(
    probe: Callable[[], str | None], *, deadline_s: float, who: str, whom: str, phase: str, interval_s: float = 0.1
) -> None:
    """Call `probe` until it returns None; a string says what is still missing. Raises WaitTimeout with the last one."""
    end = time.monotonic() + deadline_s
    while (missing := probe()) is not None:
        if time.monotonic() + interval_s > end:
            raise WaitTimeout(who=who, whom=whom, phase=phase, seconds=deadline_s, last=missing)
        time.sleep(interval_s)
