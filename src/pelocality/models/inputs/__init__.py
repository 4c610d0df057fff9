"""What a model is run on: words, texts, batches, and inputs of constant content."""
