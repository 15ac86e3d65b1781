"""Text: tokenizers, chat templates, incremental detokenization and stop strings. Plain Python, without jax."""
