"""How long an audit takes, in seconds of processor time on one thread.

python -m benchmarks.auditing            # a model of SmolLM2's shape, and one of 1.1 billion parameters
python -m benchmarks.auditing --smoke    # tiny ones
"""

import time

import torch
from transformers import LlamaConfig, LlamaModel

from benchmarks.measuring import arguments
from pelocality import audit

SHAPES = {  # layers, width, heads, heads of keys, width between
    "SmolLM2-135M": (30, 576, 9, 3, 1536),
    "1.1 billion parameters": (16, 2048, 32, 8, 8192),
}

if __name__ == "__main__":
    smoke = arguments(__doc__.split("\n")[0]).smoke
    torch.set_num_threads(1)
    for name, (layers, width, heads, keys, between) in SHAPES.items():
        sizes = {"num_hidden_layers": 2 if smoke else layers, "intermediate_size": 64 if smoke else between}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": width}
        model = LlamaModel(LlamaConfig(**sizes, vocab_size=99 if smoke else 49152, max_position_embeddings=8192))
        audit(model)
        start = time.process_time()
        audit(model)
        print(f"{name}: {time.process_time() - start:.2f} s")
