"""A module and its optimizer, put away on the drive as a whole, and brought back."""
