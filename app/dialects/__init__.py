"""The APIs of other servers; `fields` has what they share, `embedding_server` is the smallest."""
