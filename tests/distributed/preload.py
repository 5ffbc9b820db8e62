"""Imported once by the process that test workers are forked from, so that no worker imports megatron-core itself."""

from gspo_megatron.mcore import cpu

cpu.install()

import gspo_megatron.mcore.model  # noqa: E402, F401
import gspo_megatron.optimize  # noqa: E402, F401
