"""§6: what a result is worth."""
