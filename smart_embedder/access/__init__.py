"""Who a client is, what its token allows, and how many requests it may send."""
