"""Structured output: from what a request asks of its text to the tokens that may come next. No JAX here."""
