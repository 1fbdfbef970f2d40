# pyright: reportMissingImports=false
"""Makes `fixtures/huggingface/`: a tiny random model of each architecture, saved by transformers, and the logits that it computes.

    python tests/checkpoint/make_huggingface_fixtures.py

Needs torch and transformers (docs/dependencies.md), not JAX. Run once; the versions are written beside the fixtures. Every vector is
away from its initial 0 or 1, so that none can be lost unseen.
"""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

FOLDER = Path(__file__).with_name("fixtures") / "huggingface"
LENGTH = 20
_NEW = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": LENGTH}
_OLD = {"n_embd": 16, "n_head": 2, "n_positions": LENGTH}
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cohere2": (
        transformers.Cohere2Config,
        {"num_hidden_layers": 4, "num_key_value_heads": 1, "vocab_size": 40, "sliding_window": 5, "logit_scale": 0.25} | _NEW,
    ),
    "gptj": (transformers.GPTJConfig, {"n_layer": 2, "rotary_dim": 4, "vocab_size": 40} | _OLD),
    "phi": (transformers.PhiConfig, {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 40} | _NEW),
    "llama": (
        transformers.LlamaConfig,
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 12, "vocab_size": 260, "attention_bias": True}
        | {"rope_theta": 500.0}
        | _NEW,
    ),
    "gpt2": (transformers.GPT2Config, {"n_layer": 2, "vocab_size": 40} | _OLD),
}


def random_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model of an architecture with random weights, in fp32 on the CPU."""
    kind, settings = MODELS[name]
    config = kind(**(settings | _NO_IDS | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, S, V]`` of rows of tokens."""
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in MODELS:
        model = random_model(name)
        tokens = torch.randint(0, model.config.vocab_size, (1, LENGTH))
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        save_file({"input_ids": tokens, "logits": logits_of(model, tokens).contiguous()}, FOLDER / name / "expected.safetensors")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
