#!/usr/bin/env python
"""Megatron checkpoint -> Hugging Face directory: streaming, in bounded memory, resumed by the same command."""

import sys

from gspo_megatron.convert.command import mcore_to_hf_main

if __name__ == "__main__":
    sys.exit(mcore_to_hf_main())
