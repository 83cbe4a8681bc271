"""Should I speculate, with what, and what will it give: tokenizers, acceptance, speed-up model, choice of depth."""
