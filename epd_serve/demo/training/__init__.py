"""How the built-in demo model is made: data, tokenizer, network, training, evaluation, model card."""
