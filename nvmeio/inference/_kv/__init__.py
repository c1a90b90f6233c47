"""Past keys and values: where they go, and what tells them apart."""
