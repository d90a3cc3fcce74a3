# Sourced by scripts/run_example.sh: conversations, and the tiny model with a chat template for tools and thinking.
[[ -f runs/tiny/conversations/train.parquet ]] || "${PYTHON}" scripts/examples/conversations/make_conversations.py runs/tiny/conversations/train.parquet
if [[ ! -f runs/tiny/conversations-model/chat_template.jinja ]]; then
  "${PYTHON}" scripts/make_tiny_model.py runs/tiny/conversations-model
  cp scripts/examples/conversations/chat_template.jinja runs/tiny/conversations-model/
fi
