"""noria: an LLM inference engine for XLA devices."""
