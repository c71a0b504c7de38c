"""The reference implementations that `tools.verify` compares with."""
