"""The trainer's side of in_engine/intake.py: the one request to every engine that lasts as long as the weights come in,
and the sockets beside it.

How a publisher uses it:
    with SocketChannel(options, clients, proof, path) as channel:  # or broadcast.ProcessGroupChannel
        report = send_in_slots(tensors, slots, how)                # how.send calls channel.load(slot)
        channel.end()
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence

from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.buckets import Proof, PublisherOptions, Reader
from slime_like.weight_sync.device import on_this_device
from slime_like.weight_sync.in_engine.intake import INTAKE_NAME
from slime_like.weight_sync.proof.receipt import loader_request
from slime_like.weight_sync.together import run_together
from slime_like.weight_sync.transports.readers import Listener, Readers, engine_name


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

    def load(self, where: Callable[[Reader], dict], names: Sequence[str], phase: str) -> Callable[[], object]:
        """Tell of one bucket; what waits until it is loaded. where: how a reader finds it, see in_engine.intake."""
        entries = [] if self.proof is None else self.proof.entries(names)

        def message(reader: Reader) -> dict:
            layout = self._layouts[reader[0]]
            return where(reader) | {"digest": [] if layout is None else entries[layout][reader[1]]}

        readers = self._readers()
        readers.tell(message, phase)
        return readers.hear

    def end(self) -> None:
        """Everything was sent; hear of what was digested."""
        readers = self._readers()
        self.has_ended = True
        readers.tell(lambda _: {"end": True}, "end weight sync")
        answers = readers.hear()
        self.finish()
        for (engine, rank), answer in answers.items():
            if self.proof is not None:
                self.proof.heard(engine, rank, answer["digest"])

    def _readers(self) -> Readers:
        if self._connected is None:
            self._connected = self._listener.accept(self)
        return self._connected
