"""What a transformer's hidden states are used for: vectors and scores."""
