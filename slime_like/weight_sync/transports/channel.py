"""The trainer's side of in_engine/intake.py: the one request to every engine that lasts as long as the weights come in,
and the sockets beside it.

How a publisher uses it:
    with SocketChannel(options, clients, proof, path) as channel:  # or broadcast.ProcessGroupChannel
        report = send_in_slots(tensors, slots, how)                # how.send calls channel.load(slot)
        channel.end()
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.buckets import Proof, PublisherOptions, Reader
from slime_like.weight_sync.device import on_this_device
from slime_like.weight_sync.in_engine.intake import INTAKE_NAME
from slime_like.weight_sync.proof.receipt import loader_request
from slime_like.weight_sync.together import run_together

#: How often a wait looks whether it has become pointless.
_LOOK_S = 0.5
#: How long one that has connected may take to say who it is.
_HELLO_S = 10.0
#: After an engine let go of us: how long the answer to its request, which says more, may take. SGLang's server outlives
#: its scheduler by five seconds.
LAST_WORDS_S = 8.0


def engine_name(client: EngineClient) -> str:
    """As errors name it."""
    return f"engine {client.endpoint.index} at {client.url}"


def takes_channels(client: EngineClient) -> bool:
    """Whether this engine was started with our weight loader."""
    return WEIGHT_LOADER in (client.server_info().get("custom_weight_loader") or [])


class EngineRequests:
    """One request to every engine, sent at once, in threads. Only the first source makes them, for all sources."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        order_of: Callable[[EngineClient, int], dict],
        timeout_s: float,
        who: str,
        phase: str,
    ):
        """order_of(client, rank): what that rank is told, see in_engine.intake.take."""
        self._failure: BaseException | None = None
        self._done = threading.Event()
        self._who, self._whom, self._phase = who, ", ".join(engine_name(client) for client in clients), phase
        tasks = {engine_name(client): functools.partial(_ask, client, order_of, timeout_s) for client in clients}
        threading.Thread(
            target=on_this_device(self._run), args=(tasks, timeout_s, who, phase), name=f"{who}: {phase}", daemon=True
        ).start()

    def _run(self, tasks: Mapping[str, Callable], timeout_s: float, who: str, phase: str) -> None:
        try:
            run_together(tasks, timeout_s=2 * timeout_s, who=who, phase=phase)
        except BaseException as error:  # noqa: BLE001 - raised by check()
            self._failure = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether every engine has answered, or one has failed."""
        return self._done.is_set()

    def check(self) -> None:
        """Raise what an engine's answer was, if it was a failure."""
        if self._failure is not None:
            raise self._failure

    def wait(self, seconds: float) -> None:
        """Until every engine has answered. Raises as check(), and WaitTimeout."""
        if not self._done.wait(seconds):
            raise WaitTimeout(
                who=self._who, whom=self._whom, phase=self._phase, seconds=seconds, last="every bucket was loaded"
            )
        self.check()


def _ask(client: EngineClient, order_of: Callable[[EngineClient, int], dict], timeout_s: float) -> None:
    by_rank = [
        json.dumps(order_of(client, rank) | {"timeout_s": timeout_s}).encode()
        for rank in range(client.endpoint.tp_size)
    ]
    # Longer than a bucket may take, so that a wait for a bucket, which names the rank, ends first.
    client.update_weights_from_tensor(
        loader_request(INTAKE_NAME, by_rank), load_format=WEIGHT_LOADER, timeout_s=2 * timeout_s
    )


class Channel:
    """One source's part of one sync: of the first source also the requests.

    Knows when one of them or another source fails.
    """

    def __init__(self, options: PublisherOptions, clients: Sequence[EngineClient], proof: Proof | None):
        self.options, self.proof = options, proof
        self.who = f"trainer source {options.source_index}"
        self._clients = clients
        self._requests: EngineRequests | None = None
        self.has_ended = False  # from when on engines may answer

    def start(self, kind: str, channel: str) -> None:
        """Announce our channel; the first source asks the engines to take in all of them."""
        options, source_of = self.options, self.options.source_of
        channels = {options.source_index: channel}
        if options.sources is not None:
            options.sources.new_round()
            options.sources.announce(options.source_index, channel)
        elif options.num_sources > 1:
            raise WeightSyncError(
                f"{self.who} of {options.num_sources} does not know the others (PublisherOptions.sources)"
            )
        if options.source_index:
            return
        if options.sources is not None:
            everyone = range(options.num_sources) if source_of is None else set(source_of.values())
            channels |= options.sources.channels(set(everyone) - {options.source_index})

        def order_of(client: EngineClient, rank: int) -> dict:
            engine = client.endpoint.index
            layout = None if self.proof is None else self.proof.layout_number(engine)
            mine = [channels[source] for source in sorted(channels)]
            if source_of is not None:
                mine = [channels[source_of[engine, rank]]]
            return {"kind": kind, "channels": mine, "engine": engine, "rank": rank, "layout": layout}

        self._requests = EngineRequests(self._clients, order_of, options.timeout_s, self.who, "load weights")

    def check(self) -> None:
        """Raise if the sync is lost already: an engine refused, or another source failed."""
        self.check_sources()
        self.check_engines()

    def check_sources(self) -> None:
        """Raise if another source failed."""
        if self.options.sources is not None:
            self.options.sources.check()

    def check_engines(self) -> None:
        """Raise if an engine refused, or has stopped before our end."""
        if self._requests is None:
            return
        self._requests.check()
        if self._requests.is_done and not self.has_ended:
            names = ", ".join(engine_name(client) for client in self._clients)
            raise EngineError(
                f"{self.who}: {names} stopped taking in weights before all were sent. The end of the engine's log says"
                " why."
            )

    def finish(self) -> None:
        """Wait until the engines have answered."""
        if self._requests is not None:
            self._requests.wait(self.options.timeout_s)

    def fail(self, error: BaseException) -> None:
        """Tell the other sources."""
        if self.options.sources is not None:
            self.options.sources.fail(f"{type(error).__name__}: {error}")


class SocketChannel(Channel):
    """Buckets in shared memory, which engines are told of through a socket file at `path`.

    It exists as long as this is open.
    """

    def __init__(self, options: PublisherOptions, clients: Sequence[EngineClient], proof: Proof | None, path: str):
        super().__init__(options, clients, proof)
        # A new one each time: closing it ends connections that nobody has taken up.
        self._listener = Listener(path, clients, options.readers)
        self._connected: Readers | None = None
        self._layouts = {
            client.endpoint.index: None if proof is None else proof.layout_number(client.endpoint.index)
            for client in clients
        }

    def __enter__(self) -> SocketChannel:
        try:
            self.start("socket", self._listener.path)
        except BaseException as error:
            self.__exit__(None, error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)  # before engines notice, so that the other sources know why these stop
        self._listener.close()
        if self._connected is not None:
            self._connected.close()

    def load(self, where: Callable[[Reader], dict], names: Sequence[str], phase: str) -> None:
        """One bucket. where: how a reader finds it, see in_engine.intake."""
        entries = [] if self.proof is None else self.proof.entries(names)

        def message(reader: Reader) -> dict:
            layout = self._layouts[reader[0]]
            return where(reader) | {"digest": [] if layout is None else entries[layout][reader[1]]}

        self._readers().ask(message, phase)

    def end(self) -> None:
        """Everything was sent; hear of what was digested."""
        readers = self._readers()
        self.has_ended = True
        answers = readers.ask(lambda _: {"end": True}, "end weight sync")
        self.finish()
        for (engine, rank), answer in answers.items():
            if self.proof is not None:
                self.proof.heard(engine, rank, answer["digest"])

    def _readers(self) -> Readers:
        if self._connected is None:
            self._connected = self._listener.accept(self)
        return self._connected


class Listener:
    """A socket file at `path` to which every reader connects once."""

    def __init__(self, path: str, clients: Sequence[EngineClient], readers: Sequence[Reader]):
        self.path = path
        names = {client.endpoint.index: engine_name(client) for client in clients}
        self.names = {(engine, rank): f"{names[engine]}, rank {rank}" for engine, rank in readers}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        os.chmod(path, 0o600)
        self._socket.listen(max(1, len(self.names)))

    def accept(self, channel: Channel) -> Readers:
        """All of them. channel: what its check() raises ends the wait.

        Raises WaitTimeout naming who did not come.
        """
        readers, timeout_s = Readers(self.names, channel), channel.options.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            while len(readers) < len(self.names):
                channel.check()
                if time.monotonic() > deadline:
                    late = ", ".join(name for reader, name in self.names.items() if reader not in readers)
                    raise WaitTimeout(
                        who=channel.who,
                        whom=late,
                        phase="connect for weight sync",
                        seconds=timeout_s,
                        last=f"{len(readers)} of {len(self.names)} came",
                    )
                self._socket.settimeout(_LOOK_S)
                with contextlib.suppress(TimeoutError):
                    readers.add(self._socket.accept()[0])
        except BaseException:
            readers.close()
            raise
        return readers

    def close(self) -> None:
        """Remove the file."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Readers:
    """Connections to all ranks of all engines. One thread at a time uses them."""

    def __init__(self, names: Mapping[Reader, str], channel: Channel):
        self._names, self._channel = names, channel
        self._who, self._timeout_s = channel.who, channel.options.timeout_s
        self._files: dict[Reader, BinaryIO] = {}
        self._sockets: dict[Reader, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._sockets)

    def __contains__(self, reader: object) -> bool:
        return reader in self._sockets

    def add(self, connection: socket.socket) -> None:
        """Take in one that has just connected. Raises EngineError if it is none that was expected."""
        connection.settimeout(min(_HELLO_S, self._timeout_s))
        file = connection.makefile("rb")
        try:
            hello = json.loads(file.readline())
            reader = (hello["engine"], hello["rank"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            connection.close()
            raise EngineError(
                f"{self._who}: who connected for weights did not say who it is ({type(error).__name__})"
            ) from error
        connection.settimeout(self._timeout_s)
        if reader not in self._names or reader in self._sockets:
            connection.close()
            raise EngineError(
                f"{self._who}: engine {reader[0]}, rank {reader[1]} connected for weights, which it was not asked to,"
                " or twice"
            )
        self._sockets[reader], self._files[reader] = connection, file

    def ask(self, message_of: Callable[[Reader], dict], phase: str) -> dict[Reader, dict]:
        """Send everyone a message and wait for all answers.

        Raises WeightSyncError with what an engine says, EngineError if one goes away, WaitTimeout.
        """
        for reader, connection in self._sockets.items():
            try:
                connection.sendall(json.dumps(message_of(reader)).encode() + b"\n")
            except OSError as error:
                self._answer(reader, phase)  # it may have said why before it let go
                self._went_away(reader, phase, error)
        answers: dict[Reader, dict] = {}
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for reader, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, reader)
            while selector.get_map():
                ready = selector.select(_LOOK_S) or self._last_words(selector)
                for key, _ in ready:
                    answers[key.data] = self._answer(key.data, phase)
                    selector.unregister(key.fileobj)
                if not ready and time.monotonic() > deadline:
                    late = ", ".join(name for reader, name in self._names.items() if reader not in answers)
                    raise WaitTimeout(
                        who=self._who,
                        whom=late,
                        phase=phase,
                        seconds=self._timeout_s,
                        last=f"{len(answers)} answered",
                    )
        return answers

    def _last_words(self, selector: selectors.BaseSelector) -> list[tuple]:
        """Raise if waiting has become pointless; but an engine says why here before it answers its request, and by then
        that is there: what can be read.
        """
        try:
            self._channel.check()
        except EngineError:
            if words := selector.select(0):
                return words
            raise
        return []

    def close(self) -> None:
        """Let go of all: an engine that is still waiting for weights stops."""
        for reader, connection in self._sockets.items():
            self._files[reader].close()
            connection.close()
        self._sockets, self._files = {}, {}

    def _answer(self, reader: Reader, phase: str) -> dict:
        try:
            line = self._files[reader].readline()
        except OSError as error:
            self._went_away(reader, phase, error)
        if not line:
            self._went_away(reader, phase, None)
        answer = json.loads(line)
        if "error" in answer:
            self._channel.check_sources()  # it may be another one's failure that the engine complains about
            raise WeightSyncError(
                f"{self._names[reader]}: {phase}: {answer['error']}. It may hold half of the weights."
            )
        return answer

    def _went_away(self, reader: Reader, phase: str, error: OSError | None) -> None:
        ends = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < ends:  # the answer to its request may say why
            self._channel.check()
            time.sleep(0.05)
        raise EngineError(
            f"{self._names[reader]} went away: {self._who}, {phase}{'' if error is None else f' ({error})'}"
        ) from error
