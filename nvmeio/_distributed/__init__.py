"""Ranks: their group, their messages, bytes from one to the others."""

# How long a rank may make no progress, in seconds, where nobody says.
DEFAULT_TIMEOUT_S = 120.0
