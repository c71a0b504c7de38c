"""Where vectors come from: forwards, or a cache in front of them."""
