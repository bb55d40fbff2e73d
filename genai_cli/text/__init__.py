"""Text <-> token ids: tokenizer, chat template, streaming detokenizer, stop sequences."""
