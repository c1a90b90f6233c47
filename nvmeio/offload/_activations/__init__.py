"""What autograd saved: in memory, being written, or on the drive alone."""
