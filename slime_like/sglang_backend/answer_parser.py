"""A process that reads tool calls and thinking out of answers with SGLang's own parsers: one JSON task a line on stdin,
one JSON result a line on stdout.

A process, because importing them takes seconds and half a gigabyte, and because an answer may be anything.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

from slime_like.sglang_backend import cpu_compat
from slime_like.sglang_backend.launcher import host_has_cuda


def parse_answer(task: dict) -> dict:
    """{"content", "reasoning", "calls": [[name, arguments as JSON text]], "problem": why a call is none, or None}; or
    {"unknown": which of the parsers, "known": names}.

    task: "text", "tools" (OpenAI's form), "tool_parser" and "reasoning_parser" (SGLang's names, or None); or
    "openings_of": names of functions, which gives {"openings": how a call of each begins; [] where it is not known}.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    for kind, known in known_parsers().items():
        if task[kind] not in (None, *known):
            return {"unknown": kind, "known": known}
    if "openings_of" in task:
        try:
            begins = FunctionCallParser([], task["tool_parser"]).detector.structure_info()
            return {"openings": [begins(name).begin for name in task["openings_of"]]}
        except NotImplementedError:
            return {"openings": []}
    text, reasoning, calls, problem = task["text"], None, [], None
    if task["reasoning_parser"]:
        parser = ReasoningParser(task["reasoning_parser"], stream_reasoning=False)
        reasoning, text = parser.parse_non_stream(text)
    if task["tools"] and task["tool_parser"]:
        tools = [Tool(**tool) for tool in task["tools"]]
        call_parser = FunctionCallParser(tools, task["tool_parser"])
        if call_parser.has_tool_call(text or ""):
            said, items = call_parser.parse_non_stream(text)
            calls = [[item.name, item.parameters] for item in items]
            if calls:
                text = said
            else:
                known = ", ".join(tool.function.name for tool in tools)
                problem = f"no call of one of the tools ({known}) could be read in it"
    return {"content": text or "", "reasoning": reasoning or None, "calls": calls, "problem": problem}


def known_parsers() -> dict:
    """{"tool_parser": names, "reasoning_parser": names}."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return {
        "tool_parser": sorted(FunctionCallParser.ToolCallParserEnum),
        "reasoning_parser": sorted(ReasoningParser.DetectorMap),
    }


def main() -> None:
    """Serve until stdin ends. A task that outlives its time is ended by the kernel, together with this process."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like a result
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver ends us by closing stdin
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if not host_has_cuda():
        cpu_compat.install()
    known = known_parsers()
    logging.disable(logging.ERROR)  # a malformed call is nothing to report: the environment hears of it
    _send(results, known)
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, task["seconds"])
        try:
            result = parse_answer(task)
        except Exception as error:  # noqa: BLE001 an answer may be anything, and so may be what parsing it raises
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(results, result)


def _send(stream, message: dict) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
