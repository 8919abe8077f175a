"""Shows the record in Aim, TensorBoard and Weights & Biases, which cannot affect training."""
