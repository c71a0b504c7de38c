"""The devices and processors that models run on."""
