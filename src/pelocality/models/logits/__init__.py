"""The logits of attention, computed from the weights of known families."""
