"""Runs code that a model wrote, for rewards of your own: without network, files, processes or time of ours.

util-linux makes the walls (`unshare`, `mount`, `setpriv`, `prlimit`), coreutils the deadline (`chroot`, `timeout`):

- namespaces of its own for network (nothing in it, not even loopback), processes, mounts, IPC, host name and users, and
  none below them can be made;
- a root folder of its own: /usr, the Python that runs us and what `visible` names, read-only; /sandbox/program
  with the files of the call, read-only; /sandbox/work, an empty tmpfs of bounded size, to write in (/tmp is it, too).
  No /proc, no /sys, nobody's home;
- no capability, no environment variable of ours, a user id of its own where we are root;
- bounds on processor seconds, memory and open files of each process, on processes, on what it writes and prints;
- at the deadline everything in it is killed at once, also when the one who asked is gone: its first process is
  `timeout`, which nothing inside can kill.

What it is not: a virtual machine. A hole in the kernel is a hole in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime_like.errors import UserError

#: Beyond the deadline, for the walls to be made on a busy host, and for the end of what is in them.
_GRACE_S = 20.0
_END_S = 5.0
#: Where the files of a call are, for its command.
PROGRAM = "/sandbox/program"
_TOOLS = ("unshare", "mount", "setpriv", "prlimit", "chroot", "timeout", "sh")
#: All that code inside finds in its environment.
_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/sandbox/work",
    "TMPDIR": "/sandbox/work",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
}
#: Makes the root folder. $1: its place; $2: bytes of its work; $3: the folder of its program; $4: how many paths more
#: are visible; then these, then the command that follows.
_BUILD = r"""
set -e
umask 022  # a run's own keeps everybody else out, and the program runs as somebody else
root=$1 bytes=$2 program=$3 count=$4
shift 4
mount -t tmpfs -o size=1m,mode=755,nosuid,nodev tmpfs "$root"
mkdir -p "$root/sandbox/work" "$root/dev"
mount -t tmpfs -o "size=$bytes,mode=1777,nosuid,nodev" tmpfs "$root/sandbox/work"
show() {
  mkdir -p "$root$2"
  mount --bind "$1" "$root$2"
  mount -o remount,bind,ro,nosuid,nodev "$root$2"
}
show "$program" /sandbox/program
while [ "$count" -gt 0 ]; do
  if [ -L "$1" ]; then mkdir -p "$root$(dirname "$1")"; ln -s "$(readlink "$1")" "$root$1"; else show "$1" "$1"; fi
  shift
  count=$((count - 1))
done
[ -e "$root/tmp" ] || ln -s sandbox/work "$root/tmp"
for device in null zero urandom; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mount -o remount,ro "$root"
cd "$root"
exec "$@"
"""
#: Goes in: from within, since somebody else may not enter the folder above.
_ENTER = r"""
echo 0 >/proc/sys/user/max_user_namespaces
exec chroot . "$@"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one run may take."""

    seconds: float = 10.0  # of the clock
    cpu_seconds: int = 5  # of a processor, each process
    memory_bytes: int = 512 << 20  # address space, each process
    processes: int = 16  # with their threads
    open_files: int = 64  # each process
    written_bytes: int = 16 << 20  # in /sandbox/work, all files
    output_bytes: int = 64 << 10  # of standard output, and as much of standard error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How a run ended."""

    status: int  # 0: well; 128 + n: by signal n
    stdout: bytes
    stderr: bytes
    over: str = ""  # "time" or "output": the limit that ended it


class Sandbox:
    """See the module. One serves all calls of a process; as many run at a time as there are cores.

    visible: folders that code may read beside Python's own. without_walls: where the kernel allows no namespaces, run
    with the bounds alone: code then has your network, your files and your processes to signal.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        visible: Sequence[str] = (),
        without_walls: bool = False,
        concurrency: int | None = None,
    ):
        self._limits = limits or SandboxLimits()
        self._visible = [path for path in dict.fromkeys((*_system_folders(), *visible)) if os.path.lexists(path)]
        self._without_walls = without_walls
        self._free = asyncio.Semaphore(concurrency or len(os.sched_getaffinity(0)))
        self._is_checked = without_walls

    def check(self) -> None:
        """Raises UserError, with what is missing, if this host cannot make the walls."""
        if self._is_checked:
            return
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_ENVIRONMENT["PATH"]) is None]
        why = f"no {', '.join(missing)} in /usr/bin, /usr/sbin (util-linux, coreutils)" if missing else ""
        if not missing:
            with _folders({}) as (root, program):
                command = self._command(root, program, ["true"])
                done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, timeout=_GRACE_S * 3, check=False)
            if done.returncode != 0:
                why = done.stderr.decode(errors="replace").strip() or f"status {done.returncode}"
        if why:
            raise UserError(
                f"code cannot be kept apart from this host: {why}.\n"
                "  Fix: util-linux and coreutils, and namespaces that the kernel and the container's seccomp profile"
                " allow (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)."
                " Sandbox(without_walls=True) runs it without them."
            )
        self._is_checked = True

    async def run(
        self, command: Sequence[str], *, files: Mapping[str, str | bytes] | None = None, stdin: bytes = b""
    ) -> SandboxResult:
        """Run a command in /sandbox/work, with the files (by name) in /sandbox/program.

        Example: await sandbox.run([sys.executable, "-I", PROGRAM + "/main.py"], files={"main.py": "print(1 + 1)"})
        """
        if not self._is_checked:
            await asyncio.to_thread(self.check)
        async with self._free:
            with _folders(files or {}) as (root, program):
                if self._without_walls:
                    command = [part.replace(PROGRAM, program) for part in command]
                return await self._run(self._command(root, program, list(command)), root, stdin)

    async def _run(self, command: list[str], folder: str, stdin: bytes) -> SandboxResult:
        limits, started = self._limits, time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd=folder,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        too_much = asyncio.Event()
        outputs = [_Output(limits.output_bytes, too_much) for _ in range(2)]
        talks = [asyncio.create_task(o.read(s)) for o, s in zip(outputs, (process.stdout, process.stderr), strict=True)]
        tasks = [*talks, asyncio.create_task(_feed(process.stdin, stdin)), asyncio.create_task(process.wait())]
        full = asyncio.create_task(too_much.wait())
        over = ""
        try:
            async with asyncio.timeout(limits.seconds + _GRACE_S):
                await asyncio.wait([tasks[-1], full], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            over = "time"
        finally:
            full.cancel()
            await _end(process, tasks)
        over = "output" if too_much.is_set() else over
        stdout, stderr = (bytes(output.content) for output in outputs)
        status = process.returncode if process.returncode is not None and process.returncode >= 0 else 128 + 9
        if not over and status == 128 + signal.SIGKILL and time.monotonic() - started >= limits.seconds:
            over = "time"
        return SandboxResult(status=status, stdout=stdout, stderr=stderr, over=over)

    def _command(self, root: str, program: str, command: list[str]) -> list[str]:
        limits = self._limits
        bounded = [
            *("prlimit", "--core=0", f"--cpu={limits.cpu_seconds}", f"--as={limits.memory_bytes}"),
            *(f"--nofile={limits.open_files}", f"--fsize={limits.written_bytes}"),
        ]
        timed = ["timeout", "--signal=KILL", f"{limits.seconds}"]
        if self._without_walls:  # other processes of ours would count
            return [*bounded, *timed, *command]
        inside = [
            *("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
            *(*bounded, f"--nproc={limits.processes}", *timed),
            *("sh", "-c", 'cd /sandbox/work && exec "$@"', "sh", *command),
        ]
        apart = ["unshare", "--user", "--map-root-user", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
        enter = ["sh", "-c", _ENTER, "sh", *inside]
        build = ["sh", "-c", _BUILD, "sh", root, str(limits.written_bytes), program]
        build += [str(len(self._visible)), *self._visible]
        if os.getuid() != 0:
            return [*apart, "--mount", *build, *enter]
        # Root's processes are not counted, and root's files are root's: somebody whom nobody is, instead.
        somebody = str(random.SystemRandom().randrange(1 << 30, 1 << 31))
        become = ["setpriv", f"--reuid={somebody}", f"--regid={somebody}", "--clear-groups"]
        return ["unshare", "--mount", "--propagation", "private", *build, *become, *apart, *enter]


def _system_folders() -> list[str]:
    """What programs and Python itself are made of."""
    prefixes = [path for path in (sys.base_prefix, sys.prefix) if not path.startswith("/usr")]
    return ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", *prefixes]


@contextlib.contextmanager
def _folders(files: Mapping[str, str | bytes]) -> Iterator[tuple[str, str]]:
    """(a place for the root folder, a folder with the files), which go afterwards."""
    with tempfile.TemporaryDirectory(prefix="slime-like-code-") as folder:
        root, program = Path(folder, "root"), Path(folder, "program")
        root.mkdir()
        program.mkdir()
        for name, content in files.items():
            if os.path.basename(name) != name:
                raise ValueError(f"{name!r} is no plain name of a file")
            path = program / name
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            path.chmod(0o644)  # whatever our umask is: it is read by somebody else
        program.chmod(0o755)
        yield str(root), str(program)


class _Output:
    """The first `most` bytes of a stream, which is read to its end."""

    def __init__(self, most: int, too_much: asyncio.Event):
        self._most, self._too_much, self.content = most, too_much, bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """What comes beyond is thrown away: a process whose output nobody reads does not end."""
        while part := await stream.read(1 << 16):
            if len(self.content) + len(part) > self._most:
                self._too_much.set()
            self.content += part[: self._most - len(self.content)]


async def _feed(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it need not read
        stream.write(content)
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process, tasks: Sequence[asyncio.Task]) -> None:
    """Kill it with its process group; its own namespace of processes dies with the first of them."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # Without walls a process that left the group may keep the streams open.
    _, late = await asyncio.wait(tasks, timeout=_END_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
