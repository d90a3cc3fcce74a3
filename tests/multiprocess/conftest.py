"""The fault table is printed when the tests are done."""

from __future__ import annotations

import pytest

from tests.helpers.fault_table import ROWS, as_text


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The worlds of test_fault_table.py are costly: all tests of one model, then all of the next."""
    places = [number for number, item in enumerate(items) if item.path.name == "test_fault_table.py"]
    ordered = sorted(
        (items[number] for number in places),
        key=lambda item: item.callspec.params["model"] if hasattr(item, "callspec") else "~",
    )
    for number, item in zip(places, ordered, strict=True):
        items[number] = item


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was put into weight syncs, and what said so."""
    rows = terminalreporter.config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("faults in weight syncs")
        terminalreporter.write(as_text(rows))
