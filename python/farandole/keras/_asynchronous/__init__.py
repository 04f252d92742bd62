"""Keras' fit on a parameter server, on any backend."""
