"""What is given to be published: tensors and what they are called."""
