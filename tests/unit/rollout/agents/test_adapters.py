"""Each library as an environment, played by a scripted policy; skipped where it is not installed (extra: envs)."""

# Covers slime_like.rollout.agents.adapters.

from __future__ import annotations

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slime_like.errors import PluginError
from slime_like.rollout.agents.environment import EnvironmentHost, Task, Turn
from slime_like.rollout.agents.registry import load_environment


def play(spec: str, policy, *, task: Task | None = None, seed: int = 7, most: int = 30) -> list[Turn]:
    """All turns of an episode. policy: (the last turn) -> the answer's fields."""

    async def run():
        host = EnvironmentHost(load_environment(spec), timeout_s=60.0, name=spec)
        environment = host.open("a test")
        try:
            turns = [await environment.reset(seed, task or Task(messages=[{"role": "user", "content": "hello"}]))]
            while not (turns[-1].done or turns[-1].truncated) and len(turns) < most:
                turns.append(await environment.step({"role": "assistant", "content": "", **policy(turns[-1])}))
            return turns
        finally:
            await environment.close()
            host.close()

    return asyncio.run(run())


def needs(module: str, package: str):
    pytest.importorskip(module, reason=f"{package} is not installed (extra: envs)")


def test_reasoning_gym_scores_right_and_wrong():
    needs("reasoning_gym", "reasoning-gym")
    spec = "reasoning-gym:products?min_terms=2&max_terms=2&min_digits=1&max_digits=1"

    def multiply(turn):
        left, right = re.findall(r"\d+", turn.messages[0]["content"].split("=")[0])
        return {"content": f"so <answer>{int(left) * int(right)}</answer>"}

    opening, end = play(spec, multiply)
    assert end.done and end.reward == 1.0 and "<answer>" in opening.messages[0]["content"]
    assert play(spec, multiply)[0] == opening and play(spec, multiply, seed=8)[0] != opening
    assert play(spec, lambda turn: {"content": "<answer>1000</answer>"})[-1].reward < 0.5
    assert play(spec, lambda turn: {"content": "no idea"})[-1].reward < 0.5


def test_the_score_of_reasoning_gym_is_guarded():
    needs("reasoning_gym", "reasoning-gym")
    from slime_like.rollout.agents.adapters.reasoning_gym import make_dataset, score

    entry = make_dataset("prime_factorization", {"size": 1, "seed": 1}, where="here")[0]
    assert score("prime_factorization", {"size": 1, "seed": 1}, entry, "foo") == 0, "it raises there"
    options = {"size": 1, "seed": 1, "min_terms": 2, "max_terms": 2}
    entry = make_dataset("chain_sum", options, where="here")[0]
    assert score("chain_sum", options, entry, f"<answer>{entry['answer']}</answer>") == 1
    assert score("chain_sum", options, entry, f"one of {entry['answer']} or 7 or 8") == 0, "it pays for containing it"
    for reply in (f"one of {entry['answer']}, 7, 8", f"{entry['answer']}, I think"):
        assert score("chain_sum", options, entry, reply) == 0, "it takes the commas out first"
    assert score("chain_sum", options, entry, "") == 0


def available(turn: Turn) -> list[str]:
    """The squares that TicTacToe offers."""
    return re.findall(r"\[\d\]", turn.messages[0]["content"].rpartition("Available Moves:")[2])


def test_textarena_plays_against_random_moves():
    needs("textarena", "textarena")
    ends = set()
    for seed in range(12):
        spec = "textarena:TicTacToe-v0?num_players=2"
        turns = play(spec, lambda turn: {"content": available(turn)[0]}, seed=seed)
        assert turns[-1].done and len(turns) >= 4, "nobody wins with two marks"
        assert "'invalid_move': True" not in turns[-1].info["game"], "the other's moves are those of the game"
        ends.add(turns[-1].reward)
    assert len(ends) > 1, "it does not always win"


def test_textarena_says_nothing_twice():
    needs("textarena", "textarena")
    opening, *others = play("textarena:TicTacToe-v0?num_players=2", lambda turn: {"content": available(turn)[0]})[:-1]
    assert "You are Player 0 in Tic Tac Toe" in opening.messages[0]["content"] and others
    for turn in others:
        content = turn.messages[0]["content"]
        assert "You are Player 0" not in content and content.count("Current Board") == 2  # after each one's move


def test_textarena_punishes_a_move_that_is_none():
    needs("textarena", "textarena")
    turns = play("textarena:TicTacToe-v0?num_players=2", lambda turn: {"content": "the middle"})
    assert "attempted an invalid move" in turns[1].messages[0]["content"]
    assert (len(turns), turns[-1].reward) == (3, -1.0)


def test_skyrl_gym_scores_gsm8k():
    needs("skyrl_gym", "skyrl-gym")
    task = Task(messages=[{"role": "user", "content": "6 x 12?"}], label="72")
    opening, end = play("skyrl-gym:gsm8k", lambda turn: {"content": "so #### 72"}, task=task)
    assert list(opening.messages) == task.messages and end.done and end.reward == 1.0
    assert play("skyrl-gym:gsm8k", lambda turn: {"content": "so #### 71"}, task=task)[-1].reward == 0.0


def test_aviary_offers_tools_and_takes_calls():
    needs("aviary.core", "fhaviary")

    def call(turn):
        function = {"name": "print_story", "arguments": {"story": "once"}}
        return {"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}

    turns = play("aviary:dummy", call)
    names = [tool["function"]["name"] for tool in turns[0].tools or []]
    assert "print_story" in names and turns[-1].done and turns[-1].reward > 0
    (hint, *_) = play("aviary:dummy", lambda turn: {"content": "no call"}, most=2)[1:]
    assert not hint.done and "Call one" in hint.messages[0]["content"]


def test_gymnasium_in_words():
    needs("gymnasium", "gymnasium")

    def policy(turn):
        total = re.search(r"\((\d+)", turn.messages[0]["content"])
        return {"content": "hit: 1" if total and int(total[1]) < 17 else "stick: 0"}

    turns = play("gymnasium:Blackjack-v1", policy)
    assert turns[-1].done and turns[-1].reward in (-1.0, 0.0, 1.0, 1.5)
    assert (
        "no action" in play("gymnasium:Blackjack-v1", lambda turn: {"content": "9"}, most=2)[-1].messages[0]["content"]
    )
    with pytest.raises(PluginError, match="only Discrete"):
        load_environment("gymnasium:MountainCarContinuous-v0")()


class _EchoServer(BaseHTTPRequestHandler):
    """As openenv's echo environment answers."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body.get("action", {}).get("message")
        if said == "break":
            self.send_error(500, "broken")
            return
        answer = {"observation": {"echoed": said or "ready"}, "reward": 0.1 * len(said or ""), "done": said == "stop"}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def echo_url():
    server = HTTPServer(("127.0.0.1", 0), _EchoServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_openenv_by_http(echo_url):
    opening, end = play(f"openenv:{echo_url}?said=echoed", lambda turn: {"content": "stop"})
    assert [message["content"] for message in opening.messages] == ["hello", "ready"]
    assert end.done and end.reward == pytest.approx(0.4)
    with pytest.raises(Exception, match="answered 500"):
        play(f"openenv:{echo_url}", lambda turn: {"content": "break"})
