#!/usr/bin/env bash
# Episodes that a foreign agent plays over HTTP: run-env.sh with an agent instead of an environment. The same variables; flags are passed on.
# As it stands an agent with openai's client asks the tiny model twice, on a CPU host; set the variables for your own:
#   MODEL=qwen3-8B HF_CHECKPOINT=… AGENT=my_agents.run PROMPT_DATA=tasks.jsonl bash scripts/run-served-agent.sh
set -euo pipefail
export AGENT="${AGENT:-scripts.examples.served_agent.doubt}"    # docs/serving.md: async run(base_url, prompt, request_kwargs, metadata)
export PROMPT_DATA="${PROMPT_DATA:-}"                           # JSONL
export MAX_RESPONSE_LEN="${MAX_RESPONSE_LEN:-6}"                # of one answer
exec bash "$(dirname "${BASH_SOURCE[0]}")/run-env.sh" "$@"
