"""All contact with megatron-core and Transformer Engine: parallel state, model, attention, CPU replacements."""
