"""/tokenize and /detokenize, for clients that render by themselves."""

from __future__ import annotations

from slime_like.rollout.agents.chat_turns import TemplateRefusal
from slime_like.rollout.serve.answering import Answerer
from slime_like.rollout.serve.wire import ApiError, read_ids, read_messages, read_template_kwargs, read_tools


def tokenize(body: dict, answerer: Answerer, max_context_tokens: int) -> dict:
    """{"tokens", "count", "max_model_len"} of a text or of messages. Raises ApiError."""
    text = body.get("prompt")
    if text is not None:
        if not isinstance(text, str):
            raise ApiError("prompt: must be text", param="prompt")
        special = body.get("add_special_tokens", True)
        ids = answerer.tokenizer(text, add_special_tokens=bool(special))["input_ids"]
    else:
        opens_answer = body.get("add_generation_prompt", True)
        messages = read_messages(body.get("messages"), may_end_with_answer=True)
        turns = answerer.turns(read_template_kwargs(body))
        try:
            _, ids = turns.whole(
                list(messages), list(read_tools(body.get("tools"))) or None, opens_answer=bool(opens_answer)
            )
        except TemplateRefusal as error:
            raise ApiError(f"the chat template refuses the messages: {str(error)[:500]}", param="messages") from error
    return {"tokens": list(ids), "count": len(ids), "max_model_len": max_context_tokens, "token_strs": None}


def detokenize(body: dict, answerer: Answerer) -> dict:
    """{"prompt"}: the text of ids, special tokens too. Raises ApiError."""
    ids = read_ids(body.get("tokens"), "tokens")
    answerer.check_ids(ids, "tokens")
    return {"prompt": answerer.tokenizer.decode(list(ids), skip_special_tokens=False)}
