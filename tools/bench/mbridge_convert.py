"""mbridge on the files of convert.py: a Hugging Face directory into a Megatron model and out again, on CPU.

mbridge fills and reads a model that somebody built; it has no checkpoint files. It knows the names of Transformer
Engine's grouped experts only, so the CPU's model shows itself under these. Its last line says how long both took.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import read_config
from gspo_megatron.mcore import cpu


class GroupedNames(torch.nn.Module):
    """A model of one process under the names that Transformer Engine's modules would have."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Of megatron-core's local modules."""
        super().__init__()
        self.decoder = model.decoder
        self._parameters_by_name = {grouped_name(name): p for name, p in model.named_parameters()}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """The parameters."""
        return self._parameters_by_name

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """The parameters."""
        return self._parameters_by_name.items()


def grouped_name(name: str) -> str:
    """Transformer Engine's name of a local parameter."""
    name = re.sub(r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_", name)
    return re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r".experts.\2.weight\1", name)


def main() -> int:
    """Load, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-path", type=Path, required=True, help="folder that has mbridge")
    parser.add_argument("--hf-dir", type=Path, required=True)
    parser.add_argument("--out-dir", type=Path, required=True)
    args = parser.parse_args()
    cpu.install()
    from transformers import AutoConfig

    from gspo_megatron.mcore.layer_outputs import one_process
    from gspo_megatron.mcore.model import fixed_fields, gpt_chunks, make_config

    sys.path.append(str(args.peer_path))
    from mbridge import AutoBridge

    fields, arguments = family_of(config := read_config(args.hf_dir)).transformer_config(config)
    with one_process(), torch.no_grad():
        fields |= {**fixed_fields(torch.bfloat16), "perform_initialization": False}
        (model,) = gpt_chunks(make_config(fields, arguments, "local"), arguments, "local")
        bridge = AutoBridge.from_config(AutoConfig.from_pretrained(args.hf_dir))
        times_s = [time.perf_counter()]
        bridge.load_weights([GroupedNames(model)], str(args.hf_dir))
        times_s.append(time.perf_counter())
        bridge.save_weights([GroupedNames(model)], str(args.out_dir))
        times_s.append(time.perf_counter())
    print(f"into a model {times_s[1] - times_s[0]:.1f} s, out of it, without fsync, {times_s[2] - times_s[1]:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
