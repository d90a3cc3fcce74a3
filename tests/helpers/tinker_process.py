"""A service in a process of its own, on a unix socket, and a client that notices no more than a pause when it dies.

python -m tests.helpers.tinker_process FOLDER SOCKET SETTINGS-AS-JSON
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime_like.tinker.records import Call, CallFailure, CallResult
from slime_like.tinker.store.bodies import pack_call, pack_result, unpack_call, unpack_result
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_service import Client, running_service

POLL_S = 5.0


async def serve(folder: Path, socket: str, settings: dict[str, Any]) -> None:
    """Until killed. One JSON line a request: {"submit": call} -> {"id"}; {"result": id} -> {"answer"|"failure"}."""
    async with running_service(folder, VectorTrainer(seconds=0.004), **settings) as service:
        if not await _sessions(service):
            await Client(service).open_session()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                question, reply = json.loads(line), {}
                if "submit" in question:
                    call = unpack_call(base64.b64decode(question["submit"]))
                    reply = {"id": await service.submit(call)}
                else:
                    answer = await service.result(question["result"], tenant="ann", timeout_s=POLL_S)
                    if isinstance(answer, CallResult):
                        reply = {"answer": base64.b64encode(pack_result(answer)).decode()}
                    elif isinstance(answer, CallFailure):
                        reply = {"failure": answer.message}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()

        server = await asyncio.start_unix_server(talk, socket, limit=1 << 24)
        parent = os.getppid()
        async with server:
            while os.getppid() == parent:  # it ends with the test that began it
                await asyncio.sleep(0.5)


async def _sessions(service) -> list[str]:
    from sqlalchemy import text

    async with service.database.read() as session:
        return [name for (name,) in await session.execute(text("SELECT id FROM sessions"))]


class ServiceProcess:
    """The process, and questions to it that outlive it."""

    def __init__(self, folder: Path, **settings: Any):
        self.folder, self._settings = folder, settings
        self._socket = str(folder / "s")
        self._process: subprocess.Popen | None = None
        self.num_kills = 0

    def start(self) -> None:
        """Begin, on what there is."""
        Path(self._socket).unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.helpers.tinker_process", str(self.folder), self._socket]
        self._process = subprocess.Popen([*command, json.dumps(self._settings)])

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)
        self.num_kills += 1

    async def wait_until_up(self) -> None:
        """It listens."""
        async with asyncio.timeout(60):
            while not Path(self._socket).exists():
                await asyncio.sleep(0.02)

    async def _ask(self, question: dict[str, str], deadline: float) -> dict[str, str]:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 24)
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    async with asyncio.timeout(POLL_S + 30):
                        line = await reader.readline()
                finally:
                    writer.close()
                if line:
                    return json.loads(line)
            except OSError:
                pass
            assert time.monotonic() < deadline, "the service does not come back"
            await asyncio.sleep(0.02)

    async def do(self, call: Call, timeout_s: float = 120.0) -> CallResult | str:
        """A call's answer, or the failure's message."""
        deadline = time.monotonic() + timeout_s
        question = {"submit": base64.b64encode(pack_call(call)).decode()}
        request_id = (await self._ask(question, deadline))["id"]
        while True:
            reply = await self._ask({"result": request_id}, deadline)
            if "answer" in reply:
                return unpack_result(base64.b64decode(reply["answer"]))
            if "failure" in reply:
                return reply["failure"]
            assert time.monotonic() < deadline, f"no answer to {call.kind} {call.seq_id} in {timeout_s} s"


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
