"""An open stream: the tensors that modules show, the weights in memory, and their users."""
