"""Hugging Face <-> Megatron: one table of invertible operations serves files, live ranks and the push to SGLang."""
