"""Run a command that cannot outlive us: `start_guarded(...)` gives a process whose whole tree dies with its parent.

Three processes: parent -> supervisor (this file, run as a script, standard library only) -> command.
The supervisor holds the reading end of a pipe to the parent. When the parent closes it, or dies in any way,
SIGKILL included, the command's process group gets TERM, and after a grace KILL; then every remaining descendant
is killed, also one that left the group (the supervisor is their reaper). If the supervisor itself is killed,
the kernel kills the command (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: How often the supervisor looks whether its parent is still there, should another process hold the pipe open.
_PARENT_CHECK_S = 1.0
#: When a command's mapped files are first looked for, and the longest time until the next look.
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 2.0, 5.0
#: Between TERM and KILL when the parent has died without saying goodbye.
_ORPHAN_GRACE_S = 2.0


class GuardedProcess:
    """A running command and its supervisor; made by `start_guarded`."""

    def __init__(self, supervisor: subprocess.Popen, pid: int, control: int, log_path: str):
        self._supervisor = supervisor
        self._control = control
        self.pid = pid  # of the command, which is also its process group
        self.supervisor_pid = supervisor.pid
        self.log_path = log_path

    def poll(self) -> int | None:
        """None while the command runs, else its exit status (128 + signal number if one ended it)."""
        code = self._supervisor.poll()
        return 128 - code if code is not None and code < 0 else code

    def close(self, grace_s: float = 5.0) -> None:
        """End the command and everything it started: TERM, after `grace_s` KILL. Harmless when called twice."""
        if self._control >= 0:
            with contextlib.suppress(BrokenPipeError):  # the supervisor has ended already
                os.write(self._control, f"{grace_s}\n".encode())
            os.close(self._control)
            self._control = -1
        try:
            self._supervisor.wait(timeout=grace_s + 10.0)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if self._supervisor.returncode == -signal.SIGKILL:  # then nobody has swept the group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines of the command's output; secrets are already replaced."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
        except FileNotFoundError:
            return f"(no log at {self.log_path})"


def start_guarded(
    argv: list[str],
    *,
    env: dict[str, str],
    log_path: str,
    cwd: str | None = None,
    secrets: tuple[str, ...] = (),
    remove_mapped: tuple[str, ...] = (),
    remove_folder: str | None = None,
) -> GuardedProcess:
    """Start `argv` under a supervisor, in a process group of its own; output goes to `log_path`, with `secrets`
    replaced by ***.

    remove_mapped: prefixes of files, such as those in shared memory, that are removed at the end if the group had them
    mapped, however it ended.
    remove_folder: a folder that is removed at the end, however it came.
    Raises FileNotFoundError or PermissionError if the command cannot be executed.
    """
    os.makedirs(os.path.dirname(os.path.abspath(log_path)), exist_ok=True)
    control_read, control_write = os.pipe()
    status_read, status_write = os.pipe()
    # -I -S: no site-packages and no script folder on sys.path, so it starts in about 20 ms and nothing can shadow the
    # standard library.
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(control_read), str(status_write)]
    try:
        supervisor = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(control_read, status_write),
        )
    except BaseException:
        for fd in (control_write, status_read):
            os.close(fd)
        raise
    finally:
        os.close(control_read)
        os.close(status_write)
    # Through the pipe, not the command line: other users can see command lines.
    order = {
        "argv": argv,
        "log_path": os.path.abspath(log_path),
        "secrets": [s for s in secrets if s],
        "parent": os.getpid(),
    }
    order |= {"remove": remove_mapped, "folder": remove_folder}
    with contextlib.suppress(BrokenPipeError):
        _write_all(control_write, json.dumps(order).encode() + b"\n")
    answer = json.loads(_read_line(status_read, timeout_s=20.0) or b'{"error": "the supervisor ended at once"}')
    os.close(status_read)
    if "pid" not in answer:
        os.close(control_write)
        supervisor.wait(timeout=10.0)
        kinds = {"FileNotFoundError": FileNotFoundError, "PermissionError": PermissionError}
        raise kinds.get(answer.get("kind", ""), OSError)(answer["error"])
    return GuardedProcess(supervisor, answer["pid"], control_write, os.path.abspath(log_path))


def group_members(group: int) -> list[int]:
    """Process ids in a process group, from /proc."""
    return [pid for pid, _, process_group in _processes() if process_group == group]


def descendants(root: int, *, only_children: bool = False) -> list[int]:
    """Process ids below `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in _processes():
        children.setdefault(parent, []).append(pid)
    if only_children:
        return children.get(root, [])
    pids, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        pids += below
        todo += below
    return pids


def _processes() -> list[tuple[int, int, int]]:
    """(process id, parent, process group) of every process that can be seen."""
    processes = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                # The command name, in parentheses, may itself hold spaces and parentheses.
                fields = file.read().rpartition(")")[2].split()
                processes.append((int(name), int(fields[1]), int(fields[2])))
    return processes


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_line(fd: int, timeout_s: float) -> bytes:
    """One line without its end; what was read until end of file or the deadline otherwise."""
    deadline, data = time.monotonic() + timeout_s, b""
    while not data.endswith(b"\n") and select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(fd, 65536)  # one line is all that is sent before the answer
        if not chunk:
            break
        data += chunk
    return data.rstrip(b"\n")


# What follows runs in the supervisor only.


class _Log:
    """Copies the command's output to the log line by line, without the secrets."""

    def __init__(self, path: str, secrets: list[str]):
        shared = os.stat(os.path.dirname(path)).st_mode & 0o044
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600 | shared)
        self._file = os.fdopen(fd, "ab", buffering=0)
        self._secrets = [secret.encode() for secret in secrets]
        self._rest = b""

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Write whole lines, keep an unfinished one for later (a secret may be cut in two by a read)."""
        head, newline, self._rest = (self._rest + data).rpartition(b"\n")
        text = head + newline
        if last or len(self._rest) > 1 << 20:
            text, self._rest = text + self._rest, b""
        for secret in self._secrets:
            text = text.replace(secret, b"***")
        try:
            self._file.write(text)
        except OSError:
            return  # a full disk must not block the command; its output is lost


def _supervise(control: int, status: int) -> int:
    """Run the order read from `control`; returns the exit status to end with."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = _read_line(control, timeout_s=20.0)
    if not line:
        return 1
    order = json.loads(line)
    try:
        log = _Log(order["log_path"], order["secrets"])
        child = subprocess.Popen(
            order["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    except OSError as error:
        os.write(status, json.dumps({"error": str(error), "kind": type(error).__name__}).encode() + b"\n")
        return 127
    os.write(status, json.dumps({"pid": child.pid}).encode() + b"\n")
    os.close(status)
    assert child.stdout is not None, "it was asked for"
    output = child.stdout.fileno()
    os.set_blocking(output, False)
    mapped = _Mapped(child.pid, order["remove"])
    grace = _watch(control, order["parent"], child, output, log, mapped)
    mapped.look()
    if grace is not None:
        _end_group(child, grace, output, log)
    _kill_rest(child.pid)
    for path in mapped.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if order["folder"]:
        import shutil  # not at the top: it takes as long as all other imports

        shutil.rmtree(order["folder"], ignore_errors=True)
    while data := _read_available(output):
        log.write(data)
    log.write(b"", last=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _watch(control: int, parent: int, child: subprocess.Popen, output: int, log: _Log, mapped: _Mapped) -> float | None:
    """Copy output until the command ends (None) or has to end (the grace in seconds)."""
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told_to_end.append(number))
    alive = os.pidfd_open(child.pid)
    watched = [control, output, alive]
    while True:
        ready = select.select(watched, [], [], _PARENT_CHECK_S)[0]
        mapped.look_again()
        if output in ready:
            data = _read_available(output)
            if data == b"":
                watched.remove(output)  # closed by everyone; the command may still run
            log.write(data or b"")
        if child.poll() is not None:
            return None
        if control in ready:
            message = os.read(control, 64)
            return float(message) if message.strip() else _ORPHAN_GRACE_S
        if told_to_end or os.getppid() != parent:
            return _ORPHAN_GRACE_S


class _Mapped:
    """Files with one of the prefixes that a process of the group has, or had, mapped.

    They are looked for now and then: of processes that got SIGKILL there is nothing left to be asked.
    """

    def __init__(self, group: int, prefixes: list[str]):
        self.files: set[str] = set()
        self._group, self._prefixes = group, [f" {prefix}" for prefix in prefixes]
        self._pause_s = _FIRST_LOOK_S
        self._next = time.monotonic() + self._pause_s

    def look_again(self) -> None:
        """Look if it is time: later each time, and never much later; what is mapped may be killed soon after."""
        if self._prefixes and time.monotonic() >= self._next:
            self.look()
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._next = time.monotonic() + self._pause_s

    def look(self) -> None:
        for pid in group_members(self._group) if self._prefixes else ():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
                self.files.update(
                    line.split()[-1]
                    for line in maps
                    if any(prefix in line for prefix in self._prefixes) and not line.endswith("(deleted)\n")
                )


def _end_group(child: subprocess.Popen, grace_s: float, output: int, log: _Log) -> None:
    """TERM to the group; KILL when it has not gone after the grace."""
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    while time.monotonic() < deadline and (child.poll() is None or _group_exists(child.pid)):
        log.write(_read_available(output) or b"")
        _reap_orphans(child)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _kill_rest(group: int) -> None:
    """KILL the rest of the group and every descendant, also those in groups of their own, until none is left (at most 5
    s).
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _reap_orphans(child: subprocess.Popen) -> None:
    """Reap what was handed down to us, but leave the command itself to Popen."""
    for pid in descendants(os.getpid(), only_children=True):
        if pid != child.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _read_available(fd: int) -> bytes | None:
    """What can be read now; b"" at end of file, None when there is nothing yet."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), int(sys.argv[2])))
