"""The pretended device, for tests of this folder; the table of host reads is printed when they are done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pretend_gpu.processes import Pretender, why_not

#: Family -> (waits of a layer, a micro-batch, a step, {line: waits of one layer in two micro-batches}).
HOST_READS: pytest.StashKey[dict[str, tuple]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """A place for the table."""
    config.stash[HOST_READS] = {}


@pytest.fixture(scope="session")
def pretend() -> Iterator[Pretender]:
    """Runs a function in processes that have a CUDA device, which is pretended; skips, with the reason, where this host
    cannot.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    pretender = Pretender()
    yield pretender
    pretender.close()


@pytest.fixture(scope="session")
def pretend_te(pretend: Pretender) -> Iterator[Pretender]:
    """The same with a pretended transformer-engine, whose layers Megatron then takes. Starts when first asked."""
    pretender = Pretender(transformer_engine=True)
    yield pretender
    pretender.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How often the host waits for the device."""
    rows = terminalreporter.config.stash.get(HOST_READS, {})
    if rows:
        terminalreporter.section("waits of the host for the device, forward and backward")
        terminalreporter.write_line(
            f"{'family':12} {'a layer':>8} {'a micro-batch':>14} {'a step':>7}  where in a layer"
        )
        for family, (layer, micro_batch, step, lines) in sorted(rows.items()):
            where = ", ".join(f"{line.rpartition('/')[2]} {count // 2}" for line, count in sorted(lines.items()))
            terminalreporter.write_line(f"{family:12} {layer:8} {micro_batch:14} {step:7}  {where}")
