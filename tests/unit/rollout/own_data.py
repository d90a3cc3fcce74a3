"""Data sources, good and bad."""

from __future__ import annotations


class Endless:
    def __init__(self, args, tokenizer):
        self.args = args

    def row_at(self, position):
        return {"prompt": [{"role": "user", "content": "sort 1"}], "label": "1"}


class ThreeRows(Endless):
    num_rows = 3

    def row_at(self, position):
        return {"prompt": [{"role": "user", "content": "count"}], "label": str(position % 3)}


class Conversations(Endless):
    def row_at(self, position):
        return {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(position)}]}


class NoRows:
    def __init__(self, args, tokenizer):
        pass


class HalfState(Endless):
    def state_dict(self):
        return {}


class TextRows(ThreeRows):
    def row_at(self, position):
        return "sort 1"


class RowsWithoutPrompt(ThreeRows):
    def row_at(self, position):
        return {"label": "1"}


class LongRows(ThreeRows):
    def row_at(self, position):
        return {"prompt": [{"role": "user", "content": "sort " * 100}], "label": "1"}


class RaisingRows(ThreeRows):
    def row_at(self, position):
        raise IndexError("no more")


class WrongNumber(Endless):
    num_rows = 0
