"""Who guesses the next tokens of a request, so that one step can verify several of them."""
