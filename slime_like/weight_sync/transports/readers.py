"""The connections through which every rank of every engine hears where weights lie, and answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.buckets import PublisherOptions, Reader
from slime_like.weight_sync.in_engine.lines import Lines

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


class Watch(Protocol):
    """Whose sync it is (channel.Channel)."""

    options: PublisherOptions
    who: str

    def check(self) -> None:
        """Raise if the sync is lost already: an engine refused, or another source failed."""

    def check_sources(self) -> None:
        """Raise if another source failed."""


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

    def accept(self, channel: Watch) -> Readers:
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

    def __init__(self, names: Mapping[Reader, str], channel: Watch):
        self._names, self._channel = names, channel
        self._who, self._timeout_s = channel.who, channel.options.timeout_s
        self._lines: dict[Reader, Lines] = {}
        self._unanswered: list[str] = []  # phases of what everyone was told

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, reader: object) -> bool:
        return reader in self._lines

    def add(self, connection: socket.socket) -> None:
        """Take in one that has just connected. Raises EngineError if it is none that was expected."""
        connection.settimeout(min(_HELLO_S, self._timeout_s))
        lines = Lines(connection)
        try:
            hello = lines.hear() or {}
            reader = (hello["engine"], hello["rank"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            connection.close()
            raise EngineError(
                f"{self._who}: who connected for weights did not say who it is ({type(error).__name__})"
            ) from error
        connection.settimeout(self._timeout_s)
        if reader not in self._names or reader in self._lines:
            connection.close()
            raise EngineError(
                f"{self._who}: engine {reader[0]}, rank {reader[1]} connected for weights, which it was not asked to,"
                " or twice"
            )
        self._lines[reader] = lines

    def tell(self, message_of: Callable[[Reader], dict], phase: str) -> None:
        """Send everyone a message, each of which is answered, in order. Raises as hear()."""
        self._unanswered.append(phase)
        for reader, lines in self._lines.items():
            try:
                lines.say(message_of(reader))
            except OSError as error:
                for before in self._unanswered:  # it may have said why before it let go
                    self._answer(reader, before, error)

    def hear(self) -> dict[Reader, dict]:
        """Everyone's answer to the oldest message that was not answered.

        Raises WeightSyncError with what an engine says, EngineError if one goes away, WaitTimeout.
        """
        phase = self._unanswered[0]
        answers = {reader: self._answer(reader, phase) for reader, lines in self._lines.items() if lines.has_one}
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for reader, lines in self._lines.items():
                if reader not in answers:
                    selector.register(lines.socket, selectors.EVENT_READ, reader)
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
        del self._unanswered[0]
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
        for lines in self._lines.values():
            lines.socket.close()
        self._lines = {}

    def _answer(self, reader: Reader, phase: str, lost: OSError | None = None) -> dict:
        try:
            answer = self._lines[reader].hear()
        except OSError as error:
            self._went_away(reader, phase, error)
        if answer is None:
            self._went_away(reader, phase, lost)
        if "error" in answer:
            self._channel.check_sources()  # it may be another one's failure that the engine complains about
            raise WeightSyncError(
                f"{self._names[reader]}: {phase}: {answer['error']}. It may hold half of the weights."
            )
        return answer

    def _went_away(self, reader: Reader, phase: str, error: OSError | None) -> NoReturn:
        ends = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < ends:  # the answer to its request may say why
            self._channel.check()
            time.sleep(0.05)
        raise EngineError(
            f"{self._names[reader]} went away: {self._who}, {phase}{'' if error is None else f' ({error})'}"
        ) from error
