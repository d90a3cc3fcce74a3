"""The measure of work that tests of plans use: it grows with the work, and not with how the code is written down."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.operations import count_operations

ON_FEW_LINES = """
def work(n):
    table = {"a": 1, "b": [i * i for i in range(n) if i % 2], "c": dict(x=n, y=n + 1)}
    return sum(len(str(value)) + n for value in table.values())
"""
ON_MANY_LINES = """
def work(
    n,
):
    table = {
        "a": 1,
        "b": [
            i * i
            for i in range(n)
            if i % 2
        ],
        "c": dict(
            x=n,
            y=n + 1,
        ),
    }
    return sum(
        len(
            str(value)
        )
        + n
        for value in table.values()
    )
"""


def operations_of(source: str, n: int) -> int:
    namespace: dict[str, Callable[[int], int]] = {}
    exec(source, namespace)
    return count_operations(lambda: namespace["work"](n))


def test_the_same_code_on_more_lines_does_as_much():
    assert operations_of(ON_FEW_LINES, 50) == operations_of(ON_MANY_LINES, 50)


def test_ten_times_the_turns_are_ten_times_the_operations():
    thousand, ten_thousand = (count_operations(lambda n=n: [i * i for i in range(n)]) for n in (1_000, 10_000))
    assert 9.9 < ten_thousand / thousand < 10.1


def test_a_loop_without_calls_counts():
    def double_loop():
        total = 0
        for i in range(100):
            for j in range(100):
                total += i * j

    assert 100 * 100 * 5 < count_operations(double_loop) < 100 * 100 * 10
