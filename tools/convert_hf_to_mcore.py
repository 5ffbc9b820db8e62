#!/usr/bin/env python
"""Hugging Face directory -> Megatron checkpoint: streaming, in bounded memory, resumed by the same command."""

import sys

from gspo_megatron.convert.command import hf_to_mcore_main

if __name__ == "__main__":
    sys.exit(hf_to_mcore_main())
