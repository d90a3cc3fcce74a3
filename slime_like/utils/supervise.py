"""A run that never ends without a word: `fork_driver()` splits train.py into a driver, which goes on, and a supervisor,
which waits for it.

The supervisor (the process that the user, SLURM or Kubernetes started) hands SIGINT, SIGTERM, SIGUSR1 and SIGHUP on,
and outlives the driver. It says what ended a driver that said no goodbye (os._exit in a user's function, a crash,
SIGKILL by the kernel) and which of the user's functions ran just then; ends every process that the driver left; removes
its temporary folders; and gives an exit status that is never 0 by accident. The driver dies with the supervisor
(PR_SET_PDEATHSIG).

Both share a piece of memory, where the driver writes what runs: a write that costs nothing, and that is still there
when the driver is not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator

from slime_like.utils.guard import descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Entries of the shared memory and the bytes of each; a user's functions run in at most a few dozen threads at once.
_NUM_ENTRIES, _ENTRY_BYTES = 256, 512
_RUNNING, _REMOVE, _GOODBYE, _STATE, _RUN_DIR = b"r", b"f", b"g", b"s", b"d"
#: From a signal to the driver until it is killed. Schedulers wait less: Kubernetes 30 s, `ray job stop` 3 s.
_DRIVER_GRACE_S = 120
#: After the driver: until TERM to what it left, so that a process that is just ending ends as it would; and from there
#: until KILL.
_LEAVE_S, _TERM_S = 1.0, 10.0
#: Repeated interrupts within this time are one: a terminal sends Ctrl-C to supervisor and driver, and the supervisor
#: hands it on.
_SAME_INTERRUPT_S = 1.0
_LISTED = 8


class Board:
    """Texts in memory that outlives the process that writes them; one process writes, another reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUM_ENTRIES * _ENTRY_BYTES)
        self._free = list(reversed(range(_NUM_ENTRIES)))  # pop and append are atomic: threads share it without a lock

    def put(self, kind: bytes, text: str) -> int | None:
        """Write an entry; gives its number, None if all are taken."""
        try:
            number = self._free.pop()
        except IndexError:
            return None
        data, start = text.encode(errors="replace")[: _ENTRY_BYTES - 3], number * _ENTRY_BYTES
        self._memory[start + 1 : start + 3 + len(data)] = struct.pack("<H", len(data)) + data
        self._memory[start : start + 1] = kind  # last, so that nobody reads half an entry
        return number

    def clear(self, number: int) -> None:
        """Take an entry back."""
        self._memory[number * _ENTRY_BYTES : number * _ENTRY_BYTES + 1] = b"\0"
        self._free.append(number)

    def texts(self, kind: bytes) -> list[str]:
        """The entries of a kind."""
        starts = [
            start for start in range(0, len(self._memory), _ENTRY_BYTES) if self._memory[start : start + 1] == kind
        ]
        sizes = [struct.unpack("<H", self._memory[start + 1 : start + 3])[0] for start in starts]
        return [
            self._memory[start + 3 : start + 3 + size].decode(errors="replace")
            for start, size in zip(starts, sizes, strict=True)
        ]


#: The driver's board and process id; None where nobody supervises.
_driver: tuple[Board, int] | None = None
_state_entry: int | None = None
#: What the supervisor says of a driver that said no goodbye, from: its state (`keep_state`) and its run directory, each
#: in a list that may be empty, its process id, what ended it, and the exit status.
TellLost = Callable[[list[str], list[str], int, str, int], str]


def fork_driver(tidy: Callable[[], None] = lambda: None, tell_lost: TellLost = lambda *_: "") -> int | None:
    """Returns None in the driver, a new process.

    In the supervisor: its exit status, once the driver and all that it started have ended.
    tidy: what the supervisor does when all have ended, besides removing folders (`remove_at_end`). tell_lost: what it
    prints below the reason why a driver ended without a goodbye.
    Call it before threads are started, and leave with sys.exit: what leaves in another way has not said goodbye.
    The driver keeps the caller's SIGTERM handler, which a terminal that goes away (SIGHUP) calls too. What was ignored
    stays so (nohup, a shell's background).
    """
    board = Board()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    passed_on = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
    handed = {number for number in passed_on if signal.getsignal(number) is not signal.SIG_IGN}
    # one that comes now is delivered when both sides are ready for it
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor, driver = os.getpid(), os.fork()
    if driver == 0:
        _begin_driver(board, supervisor, handed)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        return None
    status = _supervise(board, driver, handed, passed_on, tell_lost)
    tidy()
    return status


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """While the block runs, the supervisor knows of `what`, and says it if the driver ends meanwhile."""
    number = _put(_RUNNING, what)
    try:
        yield
    finally:
        if number is not None and _driver is not None:
            _driver[0].clear(number)


def remove_at_end(folder: str) -> bool:
    """Have the supervisor remove a folder after the driver and all that it started have ended, however they end.

    Returns False where nobody supervises.
    """
    return _put(_REMOVE, folder) is not None


def keep_state(text: str) -> None:
    """Keep what the driver is doing, in place of what was kept before, where the supervisor finds it."""
    global _state_entry
    before, _state_entry = _state_entry, _put(_STATE, text)
    if before is not None and _driver is not None:
        _driver[0].clear(before)


def keep_run_dir(path: str) -> None:
    """Tell the supervisor where the run leaves its files."""
    _put(_RUN_DIR, path)


def _put(kind: bytes, text: str) -> int | None:
    if _driver is None or _driver[1] != os.getpid():  # a process forked from the driver has no say
        return None
    return _driver[0].put(kind, text)


def _begin_driver(board: Board, supervisor: int, handed: set[signal.Signals]) -> None:
    global _driver
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)  # it died before the line above
    _driver = (board, os.getpid())
    atexit.register(_put, _GOODBYE, "")  # the first to be registered is the last to run
    last = -_SAME_INTERRUPT_S

    def interrupt(number, frame):
        nonlocal last
        if time.monotonic() - last >= _SAME_INTERRUPT_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    if signal.SIGINT in handed:
        signal.signal(signal.SIGINT, interrupt)
    if signal.SIGHUP in handed:
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # the supervisor hands it on as SIGTERM


# What follows runs in the supervisor only.


def _supervise(
    board: Board, driver: int, handed: set[signal.Signals], blocked: set[signal.Signals], tell_lost: TellLost
) -> int:
    """Wait for the driver, tidy up, and give the exit status."""
    received: list[int] = []
    over = False

    def hand_on(number, frame):
        if not over:
            received.append(number)
            os.kill(driver, signal.SIGTERM if number == signal.SIGHUP else number)
            signal.alarm(_DRIVER_GRACE_S)

    def give_up(number, frame):
        if not over:
            os.kill(driver, signal.SIGKILL)

    for number in handed:
        signal.signal(number, hand_on)
    signal.signal(signal.SIGALRM, give_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    # The driver is not reaped yet, so that no signal is handed to another process with its number; orphans are.
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != driver:
        os.waitpid(ended.si_pid, 0)
    over = True
    signal.alarm(0)
    wait_status = os.waitpid(driver, 0)[1]
    status, message = _verdict(os.waitstatus_to_exitcode(wait_status), board, received)
    _say(message)
    if message:
        _say(tell_lost(board.texts(_STATE), board.texts(_RUN_DIR), driver, message, status))
    left = _end_descendants()
    _say(f"these processes of the run do not end: {left}" if left else "")
    for folder in board.texts(_REMOVE):
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _say(message: str) -> None:
    """Print to standard error; a reader that is gone must not keep us from tidying up."""
    with contextlib.suppress(OSError):
        print(message, end="\n" if message else "", file=sys.stderr, flush=True)


def _verdict(code: int, board: Board, received: list[int]) -> tuple[int, str]:
    """The run's exit status, and what to say about a driver that said no goodbye."""
    said_goodbye = bool(board.texts(_GOODBYE))
    if received and (code != 0 or not said_goodbye):
        late = (
            f"RunError: the driver had not ended {_DRIVER_GRACE_S} s after {signal.Signals(received[0]).name}, and was"
            " killed."
            if code == -signal.SIGKILL
            else ""
        )
        return 128 + (signal.SIGTERM if received[0] == signal.SIGUSR1 else received[0]), late
    if code >= 0 and said_goodbye:
        return code, ""
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        how = f"was ended by {name}" + (
            "; if nobody sent it, the kernel was out of memory (see dmesg)" if code == -signal.SIGKILL else ""
        )
    else:
        how = (
            f"ended itself with status {code}, without an exception: os._exit, or a library that calls exit (Ray does,"
            " when its node process, the raylet, has died)"
        )
    during = board.texts(_RUNNING)
    more = f"\n  and {len(during) - _LISTED} more" if len(during) > _LISTED else ""
    what = (
        "while this code of the user's ran:\n  " + "\n  ".join(during[:_LISTED]) + more
        if during
        else "while no reward function of the user's ran"
    )
    return (
        128 - code if code < 0 else code or 1
    ), f"RunError: the driver {how}; {what}\n  What the run had started is being ended."


def _end_descendants() -> list[int]:
    """Wait for what the driver left behind, whose heads, as orphans, are our children: TERM to those after a moment, at
    last KILL to all.

    Only to the heads: a guard (utils/guard.py) ends what it guards itself, and removes its files. Returns who is left
    all the same.
    """
    started, signalled = time.monotonic(), set()
    while left := _living_descendants():
        seconds = time.monotonic() - started
        if seconds > _LEAVE_S + _TERM_S + 5.0:
            return left
        must_die = seconds > _LEAVE_S + _TERM_S
        for pid in left if must_die else descendants(os.getpid(), only_children=True) if seconds > _LEAVE_S else []:
            if must_die or pid not in signalled:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if must_die else signal.SIGTERM)
        time.sleep(0.05)
    return []


def _living_descendants() -> list[int]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())
