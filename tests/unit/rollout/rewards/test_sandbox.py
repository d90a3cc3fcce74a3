"""Code that means harm gets nothing and takes no more than its limits; code that does not runs as anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import types

import psutil
import pytest

from slime_like.errors import UserError
from slime_like.rollout.rewards.sandbox import PROGRAM, Sandbox, SandboxLimits
from slime_like.utils.files import PACKAGE_ROOT

pytestmark = pytest.mark.slow
PYTHON = [sys.executable, "-I", f"{PROGRAM}/main.py"]
LIMITS = SandboxLimits(
    seconds=20.0, cpu_seconds=2, memory_bytes=256 << 20, processes=8, written_bytes=4 << 20, output_bytes=10_000
)


def run(program: str, *, stdin: bytes = b"", limits: SandboxLimits = LIMITS, **options):
    sandbox = Sandbox(limits, **options)
    return asyncio.run(sandbox.run(PYTHON, files={"main.py": textwrap.dedent(program)}, stdin=stdin))


def can_make_walls() -> str:
    """Why not, if this host cannot."""
    try:
        Sandbox().check()
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", autouse=True)
def walls():
    """With the umask of a run, which keeps its files from everybody else."""
    before = os.umask(0o077)
    try:
        if why := can_make_walls():
            pytest.skip(why)
        yield
    finally:
        os.umask(before)


def test_a_program_reads_its_input_writes_files_and_prints():
    result = run(
        """
        import pathlib, sys, tempfile
        pathlib.Path("note").write_text(sys.stdin.read())
        with tempfile.TemporaryDirectory() as folder:
            print(pathlib.Path("note").read_text()[::-1], folder.startswith("/sandbox/work"))
        print("a mistake", file=sys.stderr)
        """,
        stdin=b"abc",
    )
    assert (result.status, result.stdout, result.stderr, result.over) == (0, b"cba True\n", b"a mistake\n", "")


#: What a program that means harm tries, each in a function of its own; it prints those that succeeded. Those of
#: LOOKING only look, and run outside too, where they succeed; the others would harm a host without walls.
LOOKING = {"network", "socket_of_a_neighbour", "environment", "environment_of_the_parent", "files_of_ours"}
TRIES = r"""
import ctypes, os, signal, socket, subprocess, sys

def network():
    for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 53)):
        try:
            socket.create_connection(address, timeout=1)
            return True
        except OSError:
            pass

def socket_of_a_neighbour():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + sys.argv[2])
        return True

def environment():
    return any(sys.argv[3] in str(value) for value in os.environ.values())

def environment_of_the_parent():
    for pid in [os.getppid(), *range(1, 50), int(sys.argv[4])]:
        if os.path.exists(f"/proc/{pid}/environ"):
            return True

def signals_to_the_run():
    os.kill(int(sys.argv[4]), 0)
    return True

def files_of_ours():
    return any(os.path.exists(path) for path in (sys.argv[5], os.path.expanduser("~root/.ray"), "/home", "/etc/passwd"))

def writes_outside():
    for folder in ("/", "/usr", "/sandbox", "/sandbox/program", "/dev", "/etc", os.path.dirname(os.__file__)):
        try:
            path = os.path.join(folder, "slime-like-test-of-the-sandbox")
            open(path, "w").close()
            os.unlink(path)
            return True
        except OSError:
            pass

def rights():
    return ctypes.CDLL(None).mount(b"x", b"/sandbox/program", b"tmpfs", 0, None) == 0

def rights_of_a_namespace_below():
    return ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER

def root_outside():
    return os.chroot("/usr") is None

def a_file_that_gets_more_rights():
    subprocess.run(["/bin/su", "-c", "true"], check=True, timeout=5)
    return True

names = sys.argv[6].split(",")
everything = (
    network, socket_of_a_neighbour, environment, environment_of_the_parent, signals_to_the_run, files_of_ours,
    writes_outside, rights, rights_of_a_namespace_below, root_outside, a_file_that_gets_more_rights,
)
for try_it in everything:
    try:
        if (not sys.argv[6] or try_it.__name__ in names) and try_it():
            print(try_it.__name__)
    except (OSError, subprocess.SubprocessError):
        pass
print("end")
"""


def test_nothing_of_the_host_is_reached(tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-run")
    (tmp_path / "secret").write_text("secret")
    tmp_path.chmod(0o755)
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as neighbour:
        server.bind(("127.0.0.1", 0))
        server.listen()
        neighbour.bind(f"\0slime-like-test-{os.getpid()}")
        neighbour.listen()
        facts = [
            *(str(server.getsockname()[1]), f"slime-like-test-{os.getpid()}", "a-secret-of-the-run"),
            *(str(os.getpid()), str(tmp_path / "secret")),
        ]
        command = [sys.executable, "-c", TRIES, *facts, ",".join(LOOKING)]
        outside = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert set(outside.stdout.split()) == LOOKING | {"end"}, outside.stderr
        sandbox = Sandbox(LIMITS)
        result = asyncio.run(sandbox.run([*PYTHON, *facts, ""], files={"main.py": TRIES}))
    assert (result.stdout.decode().split(), result.status) == (["end"], 0), result


HARM = {
    "endless": ("while True: pass", {"cpu_seconds": 1}, "status 137"),
    "asleep": ("import time; time.sleep(600)", {"seconds": 1.0}, "time"),
    "deaf": (
        """
        import os, signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        os.setsid() if os.getpid() != os.getsid(0) else None
        if os.fork() == 0: os.setsid()
        time.sleep(600)
        """,
        {"seconds": 1.0},
        "time",
    ),
    "kills its clock": (
        """
        import os, time
        assert not os.path.exists("/proc"), "without walls it is another's"
        os.kill(1, 9)
        os.kill(1, 15)
        time.sleep(600)
        """,
        {"seconds": 1.0},
        "status 1",  # 124: the clock takes it as its end, and everything with it; 137: its time was up before
    ),
    "memory": ("x = bytearray(1 << 30)", {}, "MemoryError"),
    "forks": ("import os\nwhile True: os.fork()", {"seconds": 5.0}, "BlockingIOError"),
    "a large file": ("open('x', 'wb').write(bytes(64 << 20))", {}, "File too large"),
    "many files": (
        "for i in range(100): open(str(i), 'wb').write(bytes(1 << 20))",
        {},
        "No space left on device",
    ),
    "open files": ("import os\nfor i in range(1000): os.dup(1)", {}, "Too many open files"),
    "talks": ("while True: print('x' * 1000)", {"cpu_seconds": 60}, "output"),
    "talks aside": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"cpu_seconds": 60}, "output"),
}


@pytest.mark.parametrize("name", HARM)
def test_limits_hold_and_nothing_is_left(name, tmp_path, monkeypatch):
    program, changed, ends = HARM[name]
    limits = SandboxLimits(**{**vars(LIMITS), **changed})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where nobody else may enter
    mark, started = f"mark-{os.getpid()}-{time.monotonic()}", time.monotonic()
    run = Sandbox(limits).run([*PYTHON, mark], files={"main.py": textwrap.dedent(program)})
    result = asyncio.run(run)
    text = f"{result.over} status {result.status} {result.stderr.decode(errors='replace')}"
    assert ends in text, text
    assert time.monotonic() - started < limits.seconds + 30
    assert len(result.stdout) <= limits.output_bytes and len(result.stderr) <= limits.output_bytes
    assert not [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or ())]
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="this is the way of users that are not root: the other tests take it")
def test_somebody_who_is_not_root_has_the_same_walls(tmp_path):
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from slime_like.rollout.rewards.sandbox import Sandbox
        from tests.unit.rollout.rewards.test_sandbox import LIMITS, PYTHON, TRIES
        assert os.getuid() == 1000
        facts = ["1", "nobody", "a-secret", str(os.getpid()), os.path.abspath("README.md")]
        result = asyncio.run(Sandbox(LIMITS).run([*PYTHON, *facts, ""], files={"main.py": TRIES}))
        print(result)
        sys.exit(result.stdout != b"end\\n")
        """
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", program],
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT = """
from slime_like.errors import UserError
from tests.unit.rollout.rewards.test_sandbox import run
try:
    run("print(1)")
    raise AssertionError("it ran")
except UserError as error:
    assert "without_walls=True" in str(error) and "unshare" in str(error) or "setpriv" in str(error), error
result = run("import os; print(os.listdir(), 'A_KEY' in os.environ)", without_walls=True)
assert result.stdout == b"[] False\\n", result
assert run("while True: pass", without_walls=True).status == 137
"""


def test_a_host_without_namespaces_is_refused_unless_it_is_asked_for():
    done = subprocess.run(
        ["unshare", "-r", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"', "sh"]
        + [sys.executable, "-c", WITHOUT],
        cwd=PACKAGE_ROOT,
        env=os.environ | {"A_KEY": "x"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_example_pays_for_outputs_alone():
    from scripts.examples.code_reward import passed_share

    def reward(code: str) -> float:
        cases = [{"input": f"{n} {n}\n", "output": f"{2 * n}\n"} for n in (1, 2)]
        sample = types.SimpleNamespace(response=f"So:\n```python\n{code}\n```\n", label=json.dumps(cases))
        return asyncio.run(passed_share(None, sample))

    assert reward("print(sum(map(int, input().split())))") == 1.0
    assert reward("print(2)") == 0.5
    assert reward("import sys; sys.exit(0)") == 0.0
