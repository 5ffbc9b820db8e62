"""GSPO (arXiv:2507.18071) for MoE language models: Megatron-Core trains, SGLang generates."""
