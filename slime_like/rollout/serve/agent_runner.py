"""Runs the agents of --agent-path in an interpreter of their own, which need not have this package.

argv: the socket to connect to, and the path of the function. The standard library only, of Python 3.9 and later;
started as a script by agent_process.py, which says what travels over the socket: one JSON object a line.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # As `python -m` has it: the user's modules lie in the current folder, and names of the standard library in ours.
    sys.path[:] = [os.getcwd(), *(one for one in sys.path if one != os.path.dirname(os.path.abspath(__file__)))]

import asyncio
import importlib
import inspect
import json
import threading
import traceback

#: Most bytes of one line: prompts and results are far shorter.
LINE_BYTES = 64 << 20


def load(path):
    """The function at package.module.function or package.module:function. Raises whatever is wrong with it."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name!r} is a {type(function).__name__}, not a function")
    inspect.signature(function).bind("base_url", "prompt", "request_kwargs", "metadata")
    return function


async def outcome(function, arguments):
    """{"result": what the function gives} or {"error": what it raised}; a plain function gets a thread."""
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            result = await function(*arguments)
        else:
            result = await in_thread(function, arguments)
        json.dumps(result)
        return {"result": result}
    except (Exception, SystemExit) as error:  # noqa: BLE001 told to the other side
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


async def in_thread(function, arguments):
    """What a plain function gives, from a daemon thread: one that never returns does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result, error):
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def run():
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:  # noqa: BLE001 carried to the waiting task
            is_plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)  # no future takes that
            error = raised if is_plain else RuntimeError(repr(raised))
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await future


async def serve(socket_path, path):
    """Answer calls until the other side closes the socket."""
    reader, writer = await asyncio.open_unix_connection(socket_path, limit=LINE_BYTES)

    def send(message):
        writer.write(json.dumps(message).encode() + b"\n")

    try:
        function = load(path)
    except Exception as error:  # noqa: BLE001 told to the other side
        traceback.print_exc()
        send({"failed": f"{type(error).__name__}: {error}"})
        await writer.drain()
        return
    send({"ready": sys.version.split()[0]})
    tasks: dict[int, asyncio.Future] = {}

    async def call(number, arguments):
        try:
            send({"number": number, **await outcome(function, arguments)})
        finally:
            tasks.pop(number, None)

    while line := await reader.readline():
        message = json.loads(line)
        if "cancel" in message:
            task = tasks.get(message["cancel"])
            if task is not None:
                task.cancel()
        else:
            tasks[message["number"]] = asyncio.ensure_future(call(message["number"], message["arguments"]))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # whatever an agent left running ends here
