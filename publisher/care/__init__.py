"""What is made, kept and removed beside the versions, and orders of operators."""
