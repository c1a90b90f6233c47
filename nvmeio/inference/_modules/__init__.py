"""The model's side of a stream: what its modules show, and how their calls are framed."""
