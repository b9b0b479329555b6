"""mtptrain: draft heads for speculative decoding, trained on and proven against their target."""

__version__ = "0.1.0"
