"""§5: the training regime."""
