"""Every patch of megatron-core, each with the upstream place and the condition for removing it."""
