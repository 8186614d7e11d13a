"""How well the router decides about labelled prompts: metrics, thresholds, reports; it embeds nothing."""
